"""Validation that builds graphs, a model left in eval mode, and what only looks like either."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import grad as imported_early

import gpuwatch
from gpuwatch.advisor import Finding
from tests.loops import convolutional, epochs, found, loader_of, only, perceptron, quiet, train

pytestmark = pytest.mark.usefixtures("records")

WASTED, LEFT = "eval-grad-enabled", "state-eval-mode"
INPUTS = torch.randn(4, 8)

Evaluation = Callable[[nn.Module], object]


def with_graphs(batches: int, back: bool = True) -> Evaluation:
    """A validation that forgot `no_grad`."""

    def evaluate(model: nn.Module) -> None:
        model.eval()
        for _ in range(batches):
            model(INPUTS)
        model.train(back)

    return evaluate


def without_graphs(batches: int, back: bool = True) -> Evaluation:
    """A validation as it should be."""
    evaluate = with_graphs(batches, back)

    def guarded(model: nn.Module) -> None:
        with torch.no_grad():
            evaluate(model)

    return guarded


def run(evaluate: Evaluation, every: int, steps: int = 200, model: nn.Module | None = None) -> list[Finding]:
    """Train, and evaluate after every so many steps, in the midst of an epoch."""
    watched = perceptron() if model is None else model
    return train(steps, model=watched, after=lambda step, *_: evaluate(watched) if step % every == every - 1 else None)


@pytest.mark.parametrize("make", [perceptron, convolutional])
@pytest.mark.parametrize(("every", "steps"), [(20, 60), (70, 200), (150, 400)])
def test_a_validation_with_graphs_is_found(make: Callable[[], nn.Module], every: int, steps: int) -> None:
    finding = only(run(with_graphs(6), every, steps, make()), WASTED)
    assert finding.where.startswith("test_probe_evaluation.py:") and "(evaluate)" in finding.where


def test_a_validation_with_graphs_at_the_end_of_each_epoch_is_found() -> None:
    model, loader = perceptron(), loader_of(30)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with_graphs(8)(model)
    watch.detach()
    findings = watch.findings()
    assert found(findings, WASTED) and not found(findings, LEFT)


def test_a_validation_with_graphs_before_the_training_forward_is_found() -> None:
    model = perceptron()
    evaluate = with_graphs(6)
    assert found(train(120, model=model, before=lambda step: None if step % 40 else evaluate(model)), WASTED)


def test_a_validation_with_graphs_of_a_model_trained_in_eval_mode_is_found() -> None:
    model = convolutional().eval()
    assert found(run(with_graphs(30, back=False), 60, model=model), WASTED)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_validation_without_graphs_is_quiet(context: Callable[[], torch.no_grad]) -> None:
    def evaluate(model: nn.Module) -> None:
        with context():
            with_graphs(10)(model)

    assert quiet(run(evaluate, 40))


def test_two_forwards_now_and_then_to_log_a_picture_are_no_validation() -> None:
    assert quiet(run(with_graphs(2), 10, 400))


def saliency(function: Callable[..., tuple[torch.Tensor, ...]]) -> Evaluation:
    """Gradients of an output with respect to the input."""

    def evaluate(model: nn.Module) -> None:
        model.eval()
        for _ in range(10):
            pixels = INPUTS.clone().requires_grad_()
            function(model(pixels).sum(), pixels)
        model.train()

    return evaluate


@pytest.mark.parametrize(
    "function", [lambda *arguments: torch.autograd.grad(*arguments), imported_early], ids=["looked-up", "imported"]
)
@pytest.mark.parametrize("every", [30, 100])
def test_saliency_in_eval_mode_needs_its_graphs(function: Callable[..., tuple[torch.Tensor, ...]], every: int) -> None:
    assert quiet(run(saliency(function), every))


def test_saliency_whose_gradients_come_after_all_forwards_needs_its_graphs() -> None:
    def evaluate(model: nn.Module) -> None:
        model.eval()
        pixels = INPUTS.clone().requires_grad_()
        outputs = [model(pixels) for _ in range(10)]
        torch.stack(outputs).sum().backward(inputs=[pixels])  # type: ignore[no-untyped-call]
        model.train()

    assert quiet(run(evaluate, 30))


class Forces(nn.Module):
    """Predicts the slope of an energy: its forward needs gradients, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = perceptron()

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Forces at these places, one for each of two energies."""
        places = places.detach().requires_grad_()
        energy = self.energy(places)
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        both: torch.Tensor = energy + slope[:, :2]
        return both


def test_a_model_that_differentiates_in_its_forward_needs_its_graphs() -> None:
    assert quiet(run(with_graphs(10), 40, model=Forces()))


@pytest.mark.parametrize("evaluation", [with_graphs, without_graphs])
@pytest.mark.parametrize(("every", "steps"), [(20, 60), (110, 200), (30, 200)])
def test_a_model_left_in_eval_mode_by_a_validation_is_found(
    evaluation: Callable[..., Evaluation], every: int, steps: int
) -> None:
    assert found(run(evaluation(3, back=False), every, steps), LEFT)


def test_a_mode_that_is_put_right_at_each_epoch_is_found_while_it_was_wrong() -> None:
    model, loader = perceptron(), loader_of(60)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for step, _, (inputs, targets) in epochs(loader, 300):
        if step % 60 == 0:
            model.train()
        if step % 60 == 30:
            without_graphs(3, back=False)(model)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    watch.detach()
    assert "30 optimizer steps" in only(watch.findings(), LEFT).evidence


def test_a_model_without_dropout_or_statistics_is_the_same_in_either_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    assert quiet(run(without_graphs(3, back=False), 20, model=model))


def test_a_model_in_eval_mode_throughout_is_a_choice() -> None:
    assert quiet(run(without_graphs(3, back=False), 20, model=convolutional().eval()))


@pytest.mark.parametrize("stage", [40, 130])
@pytest.mark.parametrize("validated", [False, True])
def test_a_second_stage_in_eval_mode_is_a_choice(stage: int, validated: bool) -> None:
    model = convolutional()

    def begin_stage(step: int) -> None:
        if step == stage:
            if validated:
                without_graphs(3)(model)
            model.eval()
        elif step > stage and step % 25 == 0:
            without_graphs(3, back=False)(model)  # it goes on in eval mode, as before

    assert quiet(train(250, model=model, before=begin_stage))
