"""Training loops that keep something on purpose, beside ones that keep it by mistake."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from gpuwatch.advisor import Finding
from tests.loops import AfterStep, Batch, loader_of, perceptron
from tests.test_leak_holders import FEATURES, LEAKS, leaks, unhurried, wide

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


class Unrolled(nn.Module):
    """A cell that is stepped through a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, and the state after the last place."""
        for place in range(inputs.shape[1]):
            state = self.cell(inputs[:, place], state)
        assert state is not None
        return self.head(state), state


def batches(sizes: Iterator[tuple[int, int]]) -> Iterator[torch.Tensor]:
    for batch, length in sizes:
        yield torch.randn(batch, length, 8)


def unroll(sizes: list[tuple[int, int]]) -> list[Finding]:
    """Train on batches of these sizes and lengths."""
    model = Unrolled()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model)
    for inputs in batches(iter(sizes)):
        optimizer.zero_grad()
        output, _ = model(inputs)
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
    return leak_findings(watch)


def test_sequences_that_grow_are_quiet() -> None:
    assert not unroll([(4, 2 + step // 12) for step in range(150)])


def test_batches_that_double_are_quiet() -> None:
    assert not unroll([(2 << step // 30, 3) for step in range(150)])


@pytest.mark.parametrize("carried", [True, False])
def test_a_state_that_is_carried_through_unrolled_steps(carried: bool) -> None:
    model, head = Unrolled(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(head.parameters(), 0.01)
    loader, state = loader_of(150, 4, 8), None
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in loader:
        scores, state = model(inputs.unsqueeze(1), state)
        if not carried:
            state = state.detach()
        optimizer.zero_grad()
        functional.mse_loss(head(scores.detach()), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    findings = leak_findings(watch)
    assert any("state" in finding.where for finding in findings) if carried else not findings


class Ema(nn.Module):
    """Keeps a running mean of its output, in an attribute or in a buffer."""

    def __init__(self, buffer: bool, detached: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)
        self.detached = detached
        if buffer:
            self.register_buffer("ema", torch.zeros(()))
        else:
            self.ema: torch.Tensor = torch.zeros(())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        output: torch.Tensor = self.layer(inputs)
        mean = output.detach().mean() if self.detached else output.mean()
        self.ema = 0.9 * self.ema + 0.1 * mean
        return output


@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("detached", [True, False])
def test_a_running_mean_in_a_module(buffer: bool, detached: bool) -> None:
    findings = leaks(lambda step, output, loss: None, 120, model=Ema(buffer, detached))
    assert any("ema" in finding.where for finding in findings) is not detached
    assert detached is not bool(findings)


def test_layers_that_are_unfrozen_midway_are_quiet() -> None:
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(6)), nn.Linear(FEATURES, 2))
    for parameter in model[:5].parameters():
        parameter.requires_grad_(False)

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step in (40, 60, 80, 100, 120):
            model[4 - (step - 40) // 20].requires_grad_(True)

    assert not leaks(after, 180, model=model)


def test_an_average_of_the_weights_that_starts_late_is_quiet() -> None:
    model = perceptron(FEATURES)
    average: list[nn.Module] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step == 70:
            average.append(copy.deepcopy(model))
        if average:
            for mine, its in zip(average[0].parameters(), model.parameters(), strict=True):
                mine.data.lerp_(its.data, 0.1)

    assert not leaks(after, 160, model=model)


def test_a_search_for_the_learning_rate_is_quiet() -> None:
    rates: list[float] = []
    losses: list[float] = []
    start = {name: tensor.clone() for name, tensor in perceptron(FEATURES).state_dict().items()}
    model = perceptron(FEATURES)

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        rates.append(1e-6 * 1.1**step)
        losses.append(loss.item())
        if step == 80:
            model.load_state_dict(start)

    assert not leaks(after, 150, model=model)


@pytest.mark.parametrize("graphs", [True, False])
def test_eight_batches_to_a_step(graphs: bool) -> None:
    model, loader = perceptron(FEATURES), loader_of(300, 4, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    parts: list[torch.Tensor] = []
    history: list[torch.Tensor] = []
    for _ in range(4):
        for number, (inputs, targets) in enumerate(loader):
            loss = functional.mse_loss(model(inputs), targets) / 8
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(loss)
            if number % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()
                total = torch.stack(parts).sum()
                history.append(total if graphs else total.detach())
                parts = []
    findings = leak_findings(watch)
    assert any("history" in finding.where for finding in findings) if graphs else not findings


def endless(loader: DataLoader[Batch]) -> Iterator[Batch]:
    while True:
        yield from loader


@pytest.mark.parametrize("cycled", [True, False])
def test_a_loop_over_a_cycle_that_no_name_leads_to(cycled: bool) -> None:
    model, loader = perceptron(2048), loader_of(140, 8, 2048)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in itertools.islice(itertools.cycle(loader) if cycled else endless(loader), 130):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    findings = leak_findings(watch)
    said = [finding.evidence for finding in findings if finding.rule == "leak-host"]
    assert bool(said) is bool(findings) is cycled
    assert not cycled or ("test_leak_pairs.py" in said[0] and "uses itertools.cycle" in said[0])


Make = Callable[[], AfterStep]


def history_of_rewards() -> AfterStep:
    rewards: dict[str, list[dict[str, torch.Tensor]]] = {"train": []}
    return lambda step, output, loss: rewards["train"].append({"reward": loss, "value": wide()})


def late() -> AfterStep:
    features: list[torch.Tensor] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step >= 110:
            features.append(wide())

    return after


@pytest.mark.parametrize(("make", "name"), [(history_of_rewards, "rewards"), (late, "features")])
def test_a_leak_is_named_within_150_steps_of_its_start(make: Make, name: str) -> None:
    assert any(name in finding.where for finding in leaks(make(), 260))
