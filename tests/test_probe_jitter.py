"""Steps that are far slower than the others, and steps that are slow for a reason."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import gpuwatch
from gpuwatch.advisor import Finding
from tests.loops import Batch, found, loader_of, only, perceptron, train
from tests.scripted import slept_time

pytestmark = pytest.mark.usefixtures("records")

RULE = "comp-step-jitter"
USUAL, SLOW = 0.004, 0.1
"""Seconds that a step sleeps."""


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests share the machine with others, the rule would rightly be silent."""
    slept_time(monkeypatch)


class Sleeping(nn.Module):
    """Sleeps in its forward as long as it is told to."""

    def __init__(self, seconds_of: Callable[[int], float]) -> None:
        super().__init__()
        self.layers = perceptron()
        self.seconds_of = seconds_of
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layers' output, late."""
        time.sleep(self.seconds_of(self.calls))
        self.calls += 1
        output: torch.Tensor = self.layers(inputs)
        return output


def every_tenth(first: int = 0) -> Callable[[int], float]:
    return lambda step: SLOW if step >= first and step % 10 == 7 else USUAL


@pytest.mark.usefixtures("slept")
def test_every_tenth_forward_being_slow_is_found_and_named() -> None:
    finding = only(train(120, model=Sleeping(every_tenth())), RULE)
    assert finding.where == "phase: forward"


@pytest.mark.usefixtures("slept")
def test_every_tenth_step_being_slow_outside_torch_is_found_and_named() -> None:
    seconds_of = every_tenth()
    model = Sleeping(lambda step: 0.001)
    finding = only(train(120, model=model, before=lambda step: time.sleep(seconds_of(step))), RULE)
    assert finding.where == "phase: other"


@pytest.mark.usefixtures("slept")
@pytest.mark.parametrize("period", [8, 10, 12])
def test_slow_steps_that_begin_when_only_some_are_looked_at_are_found(period: int) -> None:
    model = Sleeping(lambda step: SLOW if step >= 100 and step % period == 7 else 0.001)
    finding = only(train(340, model=model), RULE)
    assert finding.where in ("phase: forward", "phase: compute")


class BySize(Sampler[list[int]]):
    """Batches of given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self):  # type: ignore[no-untyped-def]
        at = 0
        for size in self.sizes:
            yield list(range(at, at + size))
            at += size


def sized(sizes: list[int]) -> list[Finding]:
    """Train on batches of these sizes; a step takes as long as its batch is large."""
    items = TensorDataset(torch.randn(sum(sizes), 8), torch.randn(sum(sizes), 2))
    loader: DataLoader[Batch] = DataLoader(items, batch_sampler=BySize(sizes))
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        time.sleep(0.001 * len(inputs))
        optimizer.step()
    watch.detach()
    return watch.findings()


@pytest.mark.parametrize("first", [0, 100])
def test_steps_on_larger_batches_are_slow_for_a_reason(first: int) -> None:
    sizes = [40 if step >= first and step % 10 == 7 else 4 for step in range(first + 120)]
    assert not found(sized(sizes), RULE)


def test_batches_that_grow_are_slow_for_a_reason() -> None:
    assert not found(sized([2 * (1 + step // 20) for step in range(160)]), RULE)


def test_a_checkpoint_every_200_steps_is_quiet() -> None:
    def save(step: int, *_: torch.Tensor) -> None:
        if step % 200 == 199:
            time.sleep(0.3)

    assert not found(train(410, before=lambda step: time.sleep(0.001), after=save), RULE)


@pytest.mark.parametrize("at", ["after", "before"])
def test_an_evaluation_every_ten_steps_is_not_part_of_them(at: str) -> None:
    model = Sleeping(lambda call: 0.0)

    def evaluate(step: int, *_: torch.Tensor) -> None:
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                model(torch.ones(4, 8))
                time.sleep(SLOW)
                model(torch.ones(4, 8))
            model.train()

    assert not found(train(150, model=model, **{at: evaluate}), RULE)  # type: ignore[arg-type]


def test_steps_of_equal_length_are_quiet() -> None:
    assert not found(train(120, before=lambda step: time.sleep(USUAL)), RULE)


def test_what_a_loop_does_between_short_epochs_is_not_part_of_its_steps() -> None:
    model, loader = perceptron(), loader_of(10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for _ in range(12):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        time.sleep(SLOW)
    watch.detach()
    assert not found(watch.findings(), RULE)
