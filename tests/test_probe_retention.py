"""Graphs of old steps that something keeps alive, and loops that keep some on purpose."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch.limits import KEPT_GRAPHS
from gpuwatch_hooks import leaks
from tests.loops import AfterStep, convolutional, epochs, found, loader_of, perceptron, quiet, train

pytestmark = pytest.mark.usefixtures("records")

RULE = "leak-graph-retained"


def losses_in_a_list() -> AfterStep:
    kept: list[torch.Tensor] = []
    return lambda step, output, loss: kept.append(loss)


def outputs_in_a_dict() -> AfterStep:
    kept: dict[int, object] = {}
    return lambda step, output, loss: kept.update({step: {"logits": output}})


def outputs_on_an_object() -> AfterStep:
    meter = SimpleNamespace(history=[])
    return lambda step, output, loss: meter.history.append(SimpleNamespace(best=output.max()))


def outputs_in_a_closure() -> AfterStep:
    chain: list[Callable[[], object]] = [lambda: None]

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        below = chain[0]
        chain[0] = lambda: (output, below)

    return after


def running_sum() -> AfterStep:
    total = [torch.zeros(())]

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        total[0] = total[0] + loss

    return after


def moving_average() -> AfterStep:
    average = [torch.zeros(())]

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        average[0] = 0.9 * average[0] + 0.1 * loss

    return after


LEAKS = [
    losses_in_a_list,
    outputs_in_a_dict,
    outputs_on_an_object,
    outputs_in_a_closure,
    running_sum,
    moving_average,
]


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("first", [0, 100, 118])
def test_graphs_that_are_kept_are_found_within_150_steps(leak: Callable[[], AfterStep], first: int) -> None:
    keep = leak()
    findings = train(first + 150, after=lambda step, *tensors: keep(step, *tensors) if step >= first else None)
    assert found(findings, RULE)


def test_losses_that_are_kept_after_long_training_are_found() -> None:
    keep = losses_in_a_list()
    findings = train(1150, after=lambda step, *tensors: keep(step, *tensors) if step >= 700 else None)
    assert found(findings, RULE)


def test_a_leak_of_a_run_that_accumulates_gradients_is_found() -> None:
    keep = losses_in_a_list()
    assert found(accumulate(keep), RULE)


def accumulate(after: AfterStep) -> list[Finding]:
    """Four batches to an optimizer step."""
    model, loader = convolutional(), loader_of(100)
    optimizer = torch.optim.Adam(model.parameters())
    watch = gpuwatch.attach(model, loader)
    for step, _, (inputs, targets) in epochs(loader, 600):
        output = model(inputs)
        loss = nn.functional.mse_loss(output, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        after(step, output, loss)
    watch.detach()
    return watch.findings()


class Recurrent(nn.Module):
    """Carries its hidden state from batch to batch: in its own attribute, or through the caller."""

    def __init__(self, inside: bool, detached: bool) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.inside = inside
        self.detached = detached
        self.hidden: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor, hidden: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the last place, and the state after it."""
        states, after = self.cell(inputs, self.hidden if self.inside else hidden)
        if self.detached:
            after = after.detach()
        self.hidden = after if self.inside else None
        return self.head(states[:, -1]), after if not self.inside else torch.zeros(())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("detached", [False, True])
def test_a_hidden_state_that_is_carried_with_its_graph_is_found(inside: bool, detached: bool) -> None:
    model = Recurrent(inside, detached)
    loader = loader_of(40)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    hidden = None
    for _, _, (inputs, targets) in epochs(loader, 120):
        scores, hidden = model(inputs.unsqueeze(1).expand(4, 6, 8), hidden if not inside else None)
        optimizer.zero_grad()
        # Only through this batch's own output: what hangs below it is kept all the same.
        torch.autograd.grad(nn.functional.mse_loss(scores, targets), list(model.head.parameters()), retain_graph=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    watch.detach()
    assert found(watch.findings(), RULE) is not detached


def last_outputs(count: int) -> AfterStep:
    kept: deque[torch.Tensor] = deque(maxlen=count)
    return lambda step, output, loss: kept.append(output)


def cleared_every(steps: int) -> AfterStep:
    kept: list[torch.Tensor] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        kept.append(loss)
        if len(kept) == steps:
            torch.stack(kept).mean().item()
            kept.clear()

    return after


def detached_sum() -> AfterStep:
    total = [torch.zeros(())]

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        total[0] = total[0] + loss.detach()

    return after


def the_best_two() -> AfterStep:
    best: list[tuple[float, int, torch.Tensor]] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        best.append((loss.item(), step, output))
        best.sort(key=lambda item: item[:2])
        del best[2:]

    return after


def numbers() -> AfterStep:
    kept: list[object] = []
    return lambda step, output, loss: kept.append((loss.item(), output.detach()))


@pytest.mark.parametrize(
    "keep", [lambda: last_outputs(30), lambda: cleared_every(20), detached_sum, the_best_two, numbers, lambda: nothing]
)
@pytest.mark.parametrize("steps", [60, 250, 400])
def test_what_is_let_go_again_is_no_leak(keep: Callable[[], AfterStep], steps: int) -> None:
    assert not found(train(steps, after=keep()), RULE)


def nothing(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
    """Keep nothing."""


@pytest.mark.parametrize("steps", [210, 290, 380])
def test_losses_of_a_long_epoch_that_are_cleared_at_its_end_are_no_leak(steps: int) -> None:
    assert not found(train(steps, after=cleared_every(100)), RULE)


def lengths(loader: torch.utils.data.DataLoader[tuple[torch.Tensor, ...]], steps: int) -> Iterator[torch.Tensor]:
    for step, _, (inputs, _targets) in epochs(loader, steps):
        yield inputs.unsqueeze(1).expand(4, 2 + step % 17, 8)


def test_sequences_of_varying_length_are_no_leak() -> None:
    model, loader = Recurrent(inside=False, detached=True), loader_of(40)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for inputs in lengths(loader, 200):
        optimizer.zero_grad()
        model(inputs)[0].square().mean().backward()
        optimizer.step()
    watch.detach()
    assert quiet(watch.findings())


def test_losses_kept_of_the_second_of_two_networks_are_found() -> None:
    first, second = perceptron(), perceptron(2)
    optimizers = [torch.optim.SGD(network.parameters(), 0.01) for network in (first, second)]
    loader, kept = loader_of(100), []
    watches = [gpuwatch.attach(first, loader), gpuwatch.attach(second, loader)]
    for _, _, (inputs, _targets) in epochs(loader, 150):
        made = first(inputs)
        for optimizer, judged in zip(reversed(optimizers), (made.detach(), made), strict=True):
            loss = second(judged).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if judged is not made:
                kept.append(loss)
    watches[0].detach()
    watches[1].detach()
    assert found(watches[1].findings(), RULE)


def test_a_cause_that_has_a_name_is_not_told_without_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locally the advisor leaves the nameless place out; dashboards and alerts see every observation."""
    monkeypatch.setattr(leaks, "ALLOWANCE_NANOSECONDS", 1_000_000_000)
    kept: list[torch.Tensor] = []
    model, loader = perceptron(), loader_of(200)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for _, _, (inputs, targets) in epochs(loader, 200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        kept.append(loss)
    assert watch._run is not None
    observations = watch._run.session.snapshot().observations
    watch.detach()
    places = [seen.where for seen in observations if seen.rule == RULE and seen.magnitude >= KEPT_GRAPHS]
    assert len(places) == 1 and places[0].startswith("kept (list)")
