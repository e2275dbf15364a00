"""Descriptors, hooks and optimizers that pile up, on real loops; and the loops that look like them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch_hooks.trend import Trend
from tests.loops import Batch, epochs, found, loader_of, only, perceptron, quiet, train

pytestmark = pytest.mark.usefixtures("records")

SGD = torch.optim.SGD
Parameters = Iterator[nn.Parameter]


@pytest.fixture
def opened() -> Iterator[list[int]]:
    """Descriptors that a test opens."""
    files: list[int] = []
    yield files
    for file in files:
        os.close(file)


def test_a_file_left_open_at_every_step_is_found(opened: list[int]) -> None:
    findings = train(100, after=lambda *_: opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(2)))
    finding = only(findings, "leak-fds")
    assert "2 more a step" in finding.evidence


def test_files_opened_at_the_start_and_a_pool_that_fills_are_quiet(opened: list[int]) -> None:
    def fill(step: int, *_: object) -> None:
        if step < 30:
            opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(4))

    assert not found(train(200, after=fill), "leak-fds")


def test_files_that_are_opened_and_closed_are_quiet() -> None:
    def use(*_: object) -> None:
        for _number in range(4):
            os.close(os.open(os.devnull, os.O_RDONLY))

    assert quiet(train(100, after=use))


def hook(*_: object) -> None:
    """A hook of the user's."""


@pytest.mark.parametrize(
    "register",
    [
        lambda model: model[0].register_forward_hook(hook),
        lambda model: model[3].register_full_backward_hook(hook),
        lambda model: model[0].weight.register_hook(hook),
    ],
)
def test_a_hook_at_every_epoch_is_found_and_its_module_named(register: Callable[[Any], object]) -> None:
    model = perceptron()
    findings = train(120, model=model, before=lambda step: step % 12 == 0 and register(model))
    assert only(findings, "leak-hooks").where in ("0", "3")


def test_hooks_of_the_start_and_hooks_taken_out_again_are_quiet() -> None:
    model = perceptron()
    handles: list[Any] = []

    def register(step: int) -> None:
        if step < 3:
            model[2].register_forward_hook(hook)
        while handles:
            handles.pop().remove()
        handles.append(model[0].register_forward_hook(hook))

    assert quiet(train(150, model=model, before=register))


def loop(make: Callable[[int, nn.Module], torch.optim.Optimizer | None], steps: int = 120) -> list[Finding]:
    """A loop that asks for a new optimizer before each step; None keeps the old one."""
    model = perceptron()
    loader = loader_of(steps)
    watch = gpuwatch.attach(model, loader)
    optimizer = None
    for step, _, (inputs, targets) in epochs(loader, steps):
        fresh = make(step, model)
        if fresh is not None:
            optimizer = fresh
        del fresh
        assert optimizer is not None
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    watch.detach()
    return watch.findings()


@pytest.mark.parametrize(
    "kind", [lambda some: torch.optim.Adam(some), lambda some: SGD(some, 0.1, momentum=0.9)], ids=["adam", "momentum"]
)
def test_an_optimizer_built_at_every_epoch_is_found(kind: Callable[[Parameters], torch.optim.Optimizer]) -> None:
    finding = only(loop(lambda step, model: kind(model.parameters()) if step % 20 == 0 else None), "opt-recreated")
    assert finding.evidence.startswith("5 times")


def test_plain_sgd_and_two_phases_are_quiet() -> None:
    assert quiet(loop(lambda step, model: SGD(model.parameters(), 0.01) if step % 20 == 0 else None))
    assert quiet(loop(lambda step, model: torch.optim.Adam(model.parameters()) if step % 60 == 0 else None))


def test_an_optimizer_that_takes_the_old_state_over_is_quiet() -> None:
    kept: list[torch.optim.Optimizer] = []

    def make(step: int, model: nn.Module) -> torch.optim.Optimizer | None:
        if step % 20:
            return None
        fresh = torch.optim.Adam(model.parameters())
        if kept:
            fresh.load_state_dict(kept.pop().state_dict())
        kept.append(fresh)
        return fresh

    assert quiet(loop(make))


class Tuned(nn.Module):
    """A trunk and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The head's answer."""
        answer: torch.Tensor = self.head(self.trunk(inputs))
        return answer


def test_a_trunk_that_is_computed_for_nobody_is_found_and_named() -> None:
    model = Tuned()
    findings = train(120, model=model, make_optimizer=lambda _: SGD(model.head.parameters(), 0.01))
    assert only(findings, "opt-unused-grads").where == "trunk"


def test_a_frozen_trunk_and_one_with_an_optimizer_of_its_own_are_quiet() -> None:
    frozen = Tuned()
    frozen.trunk.requires_grad_(False)
    assert quiet(train(120, model=frozen, make_optimizer=lambda _: SGD(frozen.head.parameters(), 0.01)))
    both = Tuned()
    second = SGD(both.trunk.parameters(), 0.01)

    def step_too(*_: object) -> None:
        second.step()
        second.zero_grad()

    assert quiet(train(120, model=both, make_optimizer=lambda _: SGD(both.head.parameters(), 0.01), after=step_too))


def test_a_trend_is_a_rise_in_every_quarter() -> None:
    rising, jumping, sawing = Trend(), Trend(), Trend()
    for number in range(12):
        step = 16 + 4 * number
        assert rising.due(step) and not rising.due(15)
        rising.add(step, 10.0 * number)
        jumping.add(step, 0.0 if number < 6 else 300.0)
        sawing.add(step, number % 3 * 10.0)
    assert rising.growth() == (90.0, 36)
    assert jumping.growth() == sawing.growth() == (0.0, 0)
    assert not rising.due(61) and rising.due(64)


def test_nothing_is_kept_alive(records: Path) -> None:
    import weakref

    model = perceptron()
    loader = loader_of(40)
    watch = gpuwatch.attach(model, loader)
    optimizer = torch.optim.Adam(model.parameters())
    batch: Batch
    for _, _, batch in epochs(loader, 40):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    gone = weakref.ref(optimizer), weakref.ref(model)
    del optimizer, model
    assert [reference() for reference in gone] == [None, None]
    watch.detach()
