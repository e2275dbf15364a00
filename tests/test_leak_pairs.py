"""Training loops that keep something on purpose, beside ones that keep it by mistake."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from gpuwatch.advisor import Finding
from tests.holders import FEATURES, wide
from tests.loops import AfterStep, Batch, loader_of, perceptron
from tests.test_leak_holders import LEAKS, leaks, unhurried

__all__ = ["unhurried"]

pytestmark = pytest.mark.usefixtures("records", "unhurried")


def leak_findings(watch: gpuwatch.Watch) -> list[Finding]:
    """What a watch says of leaks, at its end."""
    watch.detach()
    return [finding for finding in watch.findings() if finding.rule in LEAKS]


# -- bounded structures that fill up -----------------------------------------------------------------------------------


def filling(most: int, attached: bool) -> AfterStep:
    kept: deque[torch.Tensor] = deque(maxlen=most)
    return lambda step, output, loss: kept.append(output if attached else wide())


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(("most", "steps"), [(100, 130), (100, 260), (500, 300), (40, 200)])
def test_a_deque_that_fills_up_is_quiet(most: int, steps: int, attached: bool) -> None:
    assert not leaks(filling(most, attached), steps)


class Replay:
    """Transitions, the last so many of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.memory: list[torch.Tensor] = []
        self.place = 0

    def push(self, transition: torch.Tensor) -> None:
        """Add one, over the oldest when it is full."""
        if len(self.memory) < self.capacity:
            self.memory.append(transition)
        else:
            self.memory[self.place] = transition
        self.place = (self.place + 1) % self.capacity


class Window:
    """The last outputs, in a list of its own."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.recent: list[torch.Tensor] = []

    def push(self, output: torch.Tensor) -> None:
        """Add one; the oldest goes."""
        self.recent.append(output)
        if len(self.recent) > self.most:
            self.recent.pop(0)


@pytest.mark.parametrize("steps", [120, 220])
def test_a_replay_buffer_of_five_hundred_that_is_filling_is_quiet(steps: int) -> None:
    replay = Replay(500)
    assert not leaks(lambda step, output, loss: replay.push(wide()), steps)


@pytest.mark.parametrize("attached", [True, False])
def test_a_window_with_a_limit_in_its_code_is_quiet(attached: bool) -> None:
    window = Window(140)
    assert not leaks(lambda step, output, loss: window.push(output if attached else wide()), 240)


class Unlimited(Window):
    """Forgot the limit."""

    def push(self, output: torch.Tensor) -> None:
        """Add one."""
        self.all_outputs = [*self.all_outputs, output]

    all_outputs: tuple[torch.Tensor, ...] | list[torch.Tensor] = ()


def test_a_window_without_a_limit_is_named() -> None:
    window = Unlimited(140)
    findings = leaks(lambda step, output, loss: window.push(wide()))
    assert any("window.all_outputs" in finding.where for finding in findings)


def best_of(count: int) -> AfterStep:
    best: list[tuple[float, int, dict[str, torch.Tensor]]] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step % 4 == 0:
            best.append((loss.item(), step, {"weights": wide()}))
            best.sort(key=lambda item: item[:2])
            del best[count:]

    return after


def test_the_best_checkpoints_are_quiet() -> None:
    assert not leaks(best_of(5), 200)


class Kept(Dataset[Batch]):
    """Keeps every decoded item, or the cropped ones under keys that never come again."""

    def __init__(self, cropped: bool) -> None:
        self.cropped = cropped
        self.decoded: dict[Any, torch.Tensor] = {}

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Batch:
        key = (index, random.random()) if self.cropped else index
        if key not in self.decoded:
            self.decoded[key] = torch.zeros(FEATURES, 64)
        return self.decoded[key][:, 0], torch.zeros(2)


def test_a_data_set_that_keeps_each_item_once_is_quiet_in_its_first_epoch_and_after() -> None:
    for steps in (90, 230):
        loader = DataLoader(Kept(cropped=False), batch_size=4)
        assert not leaks(lambda step, output, loss: None, steps, loader=loader)


def test_a_data_set_that_keeps_every_crop_is_named_once_an_epoch_has_passed() -> None:
    loader = DataLoader(Kept(cropped=True), batch_size=8)  # 50 batches
    findings = leaks(lambda step, output, loss: None, 150, loader=loader)
    assert any("decoded" in finding.where for finding in findings)


# -- epochs ----------------------------------------------------------------------------------------------------------


class Trainer:
    """A loop with what it collects over an epoch."""

    def __init__(self, epoch: int, clears: bool) -> None:
        self.model = perceptron(FEATURES)
        self.loader = loader_of(epoch, 8, FEATURES)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.outputs: list[torch.Tensor] = []
        self.clears = clears

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One step; its output is collected."""
        self.optimizer.zero_grad()
        output = self.model(inputs)
        functional.mse_loss(output, targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.outputs.append(output)

    def end_epoch(self) -> float:
        """What is reported of an epoch."""
        mean = torch.cat(self.outputs).mean().item()
        if self.clears:
            self.outputs.clear()
        return mean

    def run(self, epochs: int) -> list[Finding]:
        """Train."""
        watch = gpuwatch.attach(self.model, self.loader)
        for _ in range(epochs):
            for inputs, targets in self.loader:
                self.step(inputs, targets)
            self.end_epoch()
        return leak_findings(watch)


@pytest.mark.parametrize(("epoch", "epochs"), [(20, 8), (45, 5), (60, 4), (110, 2)])
def test_outputs_of_an_epoch_that_are_cleared_at_its_end_are_quiet(epoch: int, epochs: int) -> None:
    assert not Trainer(epoch, clears=True).run(epochs)


class Forgetful(Trainer):
    """Never clears."""

    def end_epoch(self) -> float:
        """What is reported of an epoch."""
        return torch.cat(self.outputs).mean().item()


@pytest.mark.parametrize(("epoch", "epochs"), [(20, 6), (40, 4)])
def test_outputs_that_outlive_their_epoch_are_named(epoch: int, epochs: int) -> None:
    findings = Forgetful(epoch, clears=False).run(epochs)
    assert any("self.outputs" in finding.where or "outputs" in finding.where for finding in findings)


def one_epoch(model: nn.Module, loader: DataLoader[Batch], optimizer: torch.optim.Optimizer) -> float:
    losses, predictions = [], []
    for inputs, targets in loader:
        optimizer.zero_grad()
        output = model(inputs)
        loss = functional.mse_loss(output, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss)
        predictions.append((output.detach(), wide()))
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize(("epoch", "epochs"), [(20, 7), (90, 3)])
def test_lists_of_a_function_that_trains_an_epoch_are_quiet(epoch: int, epochs: int) -> None:
    model, loader = perceptron(FEATURES), loader_of(epoch, 8, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for _ in range(epochs):
        one_epoch(model, loader, optimizer)
    assert not leak_findings(watch)


def test_results_of_an_evaluation_that_are_kept_for_one_epoch_are_quiet() -> None:
    model, loader, held_out = perceptron(FEATURES), loader_of(25, 8, FEATURES), loader_of(6, 8, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for _ in range(8):
        one_epoch(model, loader, optimizer)
        model.eval()
        with torch.no_grad():
            results = [(model(inputs), wide()) for inputs, _ in held_out]
        model.train()
    assert len(results) == 6 and not leak_findings(watch)


# -- work that grows ---------------------------------------------------------------------------------------------------
