"""Waiting for data: slow items, slow starts, and waits that belong to something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch.catalog import LOADER_ITEM_SECONDS
from gpuwatch_hooks import contention, worker_side
from tests.loops import Batch, Slow, epochs, found, loader_of, only, perceptron, quiet, train
from tests.scripted import slept_time

pytestmark = pytest.mark.usefixtures("records")

STALL, ZERO, RESTART = "data-stall", "data-workers-zero", "data-epoch-restart"
COLLATE, STORAGE = "data-collate-slow", "data-io-bound"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests share the machine with others, a wait may rightly be theirs."""
    slept_time(monkeypatch)


def a_millisecond(step: int) -> None:
    """What a step takes."""
    time.sleep(0.001)


def waits(findings: list[Finding]) -> set[str]:
    """The rules on data that were found."""
    return {finding.rule for finding in findings if finding.rule.startswith("data-")}


@pytest.mark.usefixtures("slept")
@pytest.mark.parametrize("batch", [1, 4])
def test_slow_items_on_the_training_thread_are_found(batch: int) -> None:
    finding = only(
        train(90, loader=DataLoader(Slow(90 * batch, 0.006 / batch), batch_size=batch), before=a_millisecond), ZERO
    )
    assert finding.gain_bound is not None and finding.gain_bound > 1.5


def slow_collate(items: list[Batch]) -> Batch:
    """Takes its time over a batch."""
    time.sleep(0.006)
    return torch.stack([item[0] for item in items]), torch.stack([item[1] for item in items])


@pytest.mark.usefixtures("slept")
def test_a_slow_collate_on_the_training_thread_is_found() -> None:
    assert waits(train(90, loader=loader_of(90, collate_fn=slow_collate), before=a_millisecond)) & {
        STALL,
        ZERO,
        COLLATE,
    }


class SlowStream(IterableDataset[Batch]):
    """Items that come one after another, slowly."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.length):
            time.sleep(0.005)
            yield torch.ones(8), torch.zeros(2)


@pytest.mark.usefixtures("slept")
def test_a_slow_stream_is_found() -> None:
    assert ZERO in waits(train(90, loader=DataLoader(SlowStream(90), batch_size=1), before=a_millisecond))


@pytest.mark.usefixtures("slept")
def test_items_that_become_slow_when_only_some_steps_are_looked_at_are_found() -> None:
    class Later(Slow):
        def __getitem__(self, index: int) -> Batch:
            self.seconds = 0.012 if index >= 100 else 0.0
            return super().__getitem__(index)

    found_there = waits(train(400, loader=DataLoader(Later(400, 0.0), batch_size=1), before=a_millisecond))
    assert found_there & {ZERO, STORAGE}


def test_one_worker_that_cannot_keep_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a crowded machine nothing would be said; this one is taken to be none.
    monkeypatch.setattr(worker_side, "_core_wait", lambda: 0)
    monkeypatch.setattr(contention, "_run_delay", lambda: (threading.get_ident(), 0))
    loader = DataLoader(Slow(90, 0.012), batch_size=1, num_workers=1)
    assert waits(train(90, loader=loader)) & {STALL, STORAGE}


def test_workers_that_keep_up_are_quiet() -> None:
    loader = DataLoader(Slow(90, 0.002), batch_size=1, num_workers=2)
    assert not waits(train(90, loader=loader, before=lambda step: time.sleep(0.008)))


@pytest.mark.parametrize("batch", [512, 2048])
def test_large_batches_of_tensors_in_memory_are_quiet(batch: int) -> None:
    assert not waits(train(60, loader=loader_of(60, batch)))


@pytest.mark.usefixtures("slept")
def test_waits_of_a_millisecond_on_tiny_steps_are_quiet() -> None:
    assert not waits(train(120, loader=DataLoader(Slow(120, 0.001), batch_size=1)))


def validated(make_validation: Callable[[], DataLoader[Batch]], watch_it: bool, forget_eval: bool) -> list[Finding]:
    """Train, and go over a validation set after every 20 steps."""
    model, loader, validation = perceptron(), loader_of(50), make_validation()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, [loader, validation] if watch_it else loader)
    for step, _, (inputs, targets) in epochs(loader, 160):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 19:
            model.train(forget_eval)
            with torch.no_grad():
                for pixels, _ in validation:
                    model(pixels)
            model.train()
    watch.detach()
    return watch.findings()


@pytest.mark.usefixtures("slept")
@pytest.mark.parametrize("watch_it", [False, True])
@pytest.mark.parametrize("forget_eval", [False, True])
def test_a_slow_validation_loader_is_not_charged_to_training(watch_it: bool, forget_eval: bool) -> None:
    findings = validated(lambda: DataLoader(Slow(8, 0.012), batch_size=1), watch_it, forget_eval)
    assert not waits(findings)


class SlowStart(Dataset[Batch]):
    """Its workers take a while to get going."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return torch.ones(8), torch.zeros(2)


def start_slowly(worker: int) -> None:
    """What a worker does first."""
    time.sleep(0.25)


def short_epochs(**options: Any) -> list[Finding]:
    """Nine epochs of eight steps."""
    loader = DataLoader(SlowStart(8), batch_size=1, num_workers=1, worker_init_fn=start_slowly, **options)
    return train(72, loader=loader)


def test_short_epochs_that_start_their_workers_anew_are_found() -> None:
    assert "8 restarts of 1 workers" in only(short_epochs(), RESTART).evidence


def test_short_epochs_with_persistent_workers_are_quiet() -> None:
    assert not found(short_epochs(persistent_workers=True), RESTART)


def test_short_epochs_without_workers_are_quiet() -> None:
    assert not waits(train(80, loader=loader_of(8)))


@pytest.mark.usefixtures("slept")
def test_the_cost_of_an_item_is_that_of_the_training_thread() -> None:
    model, loader = perceptron(), DataLoader(Slow(60, 0.004), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert watch._run is not None
    cost = watch._run.session.snapshot().values[LOADER_ITEM_SECONDS.name]
    watch.detach()
    assert 0.004 <= cost < 0.02


def test_a_generator_is_not_timed_and_nothing_is_said_of_its_waits() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(90):
            time.sleep(0.004)
            yield torch.ones(4, 8)

    stream = batches()
    watch = gpuwatch.attach(model, stream)
    for inputs in stream:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    watch.detach()
    assert quiet(watch.findings()) and not waits(watch.findings())


def test_batches_of_a_tensor_data_set_by_a_batch_sampler_are_quiet() -> None:
    items = TensorDataset(torch.randn(4000, 8), torch.randn(4000, 2))
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(items), 50, drop_last=False)
    assert not waits(train(80, loader=DataLoader(items, batch_sampler=sampler)))
