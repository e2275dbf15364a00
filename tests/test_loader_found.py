"""Loaders that nobody gave: found as they are iterated, and told apart by what follows their batches."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import gpuwatch
from gpuwatch.catalog import (
    BETWEEN_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_STARTS,
    LOADER_DATASET_ITEMS,
    LOADER_ITEM_SECONDS,
    LOADER_SHARE,
    LOADER_WORKERS,
    LOADERS_BUILT,
    PHASE_SECONDS,
    WORKERS_IDLE,
)
from gpuwatch.expr import series_key
from gpuwatch.reader import Snapshot
from tests.loops import perceptron
from tests.scripted import slept_time

pytestmark = pytest.mark.usefixtures("records")

SLOW = 0.002
Model = torch.nn.Module


class Items(Dataset[torch.Tensor]):
    """Items that take a while."""

    def __init__(self, length: int, seconds: float = 0.0) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.ones(8)


class Run:
    """A model that is watched; no loader is given unless one is."""

    def __init__(self, *loaders: object) -> None:
        self.model = perceptron()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.watch = gpuwatch.attach(self.model, *loaders)

    def step(self, inputs: torch.Tensor) -> None:
        """A step of training."""
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def evaluate(self, batches: Iterator[torch.Tensor] | DataLoader[torch.Tensor]) -> None:
        """Forwards only."""
        self.model.eval()
        with torch.no_grad():
            for inputs in batches:
                self.model(inputs)
        self.model.train()

    def end(self) -> Snapshot:
        """What is known now; the run ends."""
        assert self.watch._run is not None
        snapshot = self.watch._run.session.snapshot()
        self.watch.detach()
        return snapshot


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others take of the machine is no wait for a loader."""
    slept_time(monkeypatch)


def data_seconds(snapshot: Snapshot) -> float:
    return snapshot.values.get(series_key(PHASE_SECONDS.name, {"phase": "data"}), 0.0)


@pytest.mark.usefixtures("slept")
def test_a_loader_that_was_not_given_is_timed() -> None:
    loader, run = DataLoader(Items(240, SLOW), 4), Run()
    for inputs in loader:
        run.step(inputs)
    snapshot = run.end()
    assert data_seconds(snapshot) > 0.9 * 59 * 4 * SLOW
    assert snapshot.values[LOADER_WORKERS.name] == 0 and snapshot.values[LOADER_DATASET_ITEMS.name] == 240
    assert snapshot.values[LOADER_ITEM_SECONDS.name] >= SLOW
    assert type(loader) is DataLoader


@pytest.mark.usefixtures("slept")
@pytest.mark.parametrize("first", [True, False])
def test_a_validation_loader_that_is_found_is_not_blamed(first: bool) -> None:
    training, validation = DataLoader(Items(400), 4), DataLoader(Items(24, 0.03), 4)
    run = Run()
    if first:
        run.evaluate(validation)  # a check before training begins
    for _ in range(2):
        for inputs in training:
            run.step(inputs)
        run.evaluate(validation)
    snapshot = run.end()
    assert data_seconds(snapshot) < 0.7, "of 1.4 s and more that the validation loader took"
    assert snapshot.values[LOADER_DATASET_ITEMS.name] == 400
    assert snapshot.values[LOADER_ITEM_SECONDS.name] < 0.001
    assert snapshot.values[EPOCH_STARTS.name] == 2 and snapshot.values[EPOCH_RESTARTS.name] == 1


@pytest.mark.usefixtures("slept")
def test_batches_for_a_check_now_and_then_are_no_training() -> None:
    training, run = DataLoader(Items(1200), 4), Run()
    checks = iter(DataLoader(Items(400, 0.02), 4))
    for number, inputs in enumerate(training):
        run.step(inputs)
        if number % 15 == 14:
            run.evaluate(itertools.islice(checks, 1))
    snapshot = run.end()
    assert data_seconds(snapshot) < 0.8, "of 1.6 s and more"
    assert snapshot.values[LOADER_DATASET_ITEMS.name] == 1200


@pytest.mark.usefixtures("slept")
@pytest.mark.parametrize("given", [True, False])
def test_two_loaders_that_a_step_takes_a_batch_of_each_both_count(given: bool) -> None:
    slow, fast = DataLoader(Items(200, SLOW), 2), DataLoader(Items(600), 2)
    run = Run(*([fast] if given else []))
    for one, other in zip(fast, slow, strict=False):
        run.step(one + other)
    snapshot = run.end()
    assert data_seconds(snapshot) > 0.9 * 99 * 2 * SLOW
    assert snapshot.values[BETWEEN_SECONDS.name] < 0.05
    assert snapshot.values[LOADER_DATASET_ITEMS.name] == 200, "the one that is waited for"
    assert snapshot.values[LOADER_SHARE.name] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("kept", [False, True])
def test_a_loader_that_is_built_anew_goes_on(kept: bool) -> None:
    data, run, all_loaders = Items(40), Run(), []
    for _ in range(5):
        loader = DataLoader(data, 4, num_workers=1, persistent_workers=kept)
        if kept:
            all_loaders.append(loader)
        for inputs in loader:
            run.step(inputs)
    values = run.end().values
    assert values[LOADERS_BUILT.name] == 5 and values[LOADER_SHARE.name] == 1
    assert values[EPOCH_STARTS.name] == 5 and values[EPOCH_RESTARTS.name] == 4
    assert values[LOADER_ITEM_SECONDS.name] > 0
    assert values[WORKERS_IDLE.name] == (2 if kept else 0), "of the two oldest it is certain at once"


def test_data_that_is_built_anew_with_its_loader_is_the_same_data() -> None:
    run = Run()
    for _ in range(3):
        for inputs in DataLoader(Items(40), 4):
            run.step(inputs)
    values = run.end().values
    assert values[LOADERS_BUILT.name] == 3 and values[EPOCH_RESTARTS.name] == 2


def test_an_iterator_for_each_step_is_an_epoch_for_each() -> None:
    loader, run = DataLoader(Items(40), 4), Run()
    for _ in range(90):
        run.step(next(iter(loader)))
    values = run.end().values
    assert values[EPOCH_STARTS.name] == 90


def test_validation_loaders_of_the_same_data_are_no_loaders_built_anew() -> None:
    data, run = Items(80), Run()
    training = DataLoader(data, 4)
    for _ in range(3):
        for inputs in training:
            run.step(inputs)
        run.evaluate(DataLoader(data, 8))
    values = run.end().values
    assert values[LOADERS_BUILT.name] == 1 and values[EPOCH_STARTS.name] == 3


def cycle(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


@pytest.mark.usefixtures("slept")
@pytest.mark.parametrize("repeat", [itertools.cycle, cycle, iter])
def test_what_goes_round_a_loader_is_seen_through(repeat: Callable[[Any], Iterator[torch.Tensor]]) -> None:
    batches = repeat(DataLoader(Items(320, SLOW), 4))
    run = Run(batches)
    for inputs in itertools.islice(batches, 75):
        run.step(inputs)
    snapshot = run.end()
    assert snapshot.values[LOADER_ITEM_SECONDS.name] >= SLOW
    assert data_seconds(snapshot) > 0.9 * 70 * 4 * SLOW


class Within(IterableDataset[torch.Tensor]):
    """Loads its items with a loader of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for inputs in DataLoader(Items(160, SLOW), 4):
            yield inputs[0]


@pytest.mark.parametrize("given", [True, False])
def test_a_loader_within_the_data_set_is_part_of_it(given: bool) -> None:
    loader = DataLoader(Within(), 2)
    run = Run(*([loader] if given else []))
    begun = time.monotonic()
    for inputs in loader:
        run.step(inputs)
    snapshot = run.end()
    assert snapshot.values[EPOCH_STARTS.name] == 1
    assert 19 * 8 * SLOW < data_seconds(snapshot) < 1.5 * (time.monotonic() - begun), "once, not twice"
    assert LOADER_DATASET_ITEMS.name not in snapshot.values, "a stream has no length; the inner data set is not it"


@pytest.mark.parametrize("given", [True, False])
def test_a_loader_on_another_thread_is_not_on_the_clock(given: bool) -> None:
    loader: DataLoader[torch.Tensor] = DataLoader(Items(600, SLOW), 4)
    run = Run()
    for _ in range(3):
        run.step(torch.ones(4, 8))
    if given:
        gpuwatch.attach(run.model, loader)
    ready: queue.Queue[torch.Tensor | None] = queue.Queue(2)

    def fill() -> None:
        for inputs in loader:
            ready.put(inputs)
        ready.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    steps = 3
    while (inputs := ready.get()) is not None:
        run.step(inputs)
        steps += 1
    thread.join()
    assert run.watch._run is not None
    clock = run.watch._run.session.clock
    snapshot = run.end()
    assert steps == clock.steps == 153
    assert data_seconds(snapshot) == 0 and snapshot.values[EPOCH_STARTS.name] == 0


class Wrapped:
    """A loader around another, without any of its attributes."""

    def __init__(self, loader: DataLoader[torch.Tensor]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        for inputs in self.loader:
            yield inputs * 2


def test_a_wrapper_that_is_given_has_the_workers_of_the_loader_within() -> None:
    loader = Wrapped(DataLoader(Items(160, SLOW), 4, num_workers=1))
    run = Run(loader)
    for _ in range(2):
        for inputs in loader:
            run.step(inputs)
    snapshot = run.end()
    assert snapshot.values[LOADER_WORKERS.name] == 1
    assert snapshot.values[LOADER_ITEM_SECONDS.name] >= SLOW
    assert snapshot.values[EPOCH_STARTS.name] == 2


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_of_torchdata_is_seen(workers: int, given: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata's own
        loader = stateful.StatefulDataLoader(Items(120, SLOW), 4, num_workers=workers)
        run = Run(*([loader] if given else []))
        for _ in range(2):
            for inputs in loader:
                run.step(inputs)
    snapshot = run.end()
    assert snapshot.values[LOADER_ITEM_SECONDS.name] >= SLOW
    assert snapshot.values[EPOCH_STARTS.name] == 2 and snapshot.values[LOADER_WORKERS.name] == workers


@pytest.mark.usefixtures("slept")
@pytest.mark.parametrize("given", [True, False])
def test_a_loop_that_asks_a_batch_ahead_trains_on_all_of_them(given: bool) -> None:
    loader = DataLoader(Items(200, SLOW), 4)
    run = Run(*([loader] if given else []))
    for _ in range(2):
        batches = iter(loader)
        ahead = next(batches)
        for following in batches:
            run.step(ahead)
            ahead = following
        run.step(ahead)
    snapshot = run.end()
    assert snapshot.values[EPOCH_STARTS.name] == 2 and snapshot.values[EPOCH_RESTARTS.name] == 1
    assert data_seconds(snapshot) > 0.85 * 2 * 47 * 4 * SLOW


class Made(Dataset[torch.Tensor]):
    """A data set that is made anew with its loader."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(8)


def kept(data: list[Dataset[torch.Tensor]], turns: int) -> float:
    """Idle workers, where a loader over each of these, with a worker that stays, is iterated so many times in turn."""
    loaders = [DataLoader(one, 2, num_workers=1, persistent_workers=True) for one in data]
    run = Run()
    for _ in range(turns):
        for loader in loaders:
            for inputs in loader:
                run.step(inputs)
    return run.end().values[WORKERS_IDLE.name]


def test_loaders_of_data_made_anew_that_are_kept_leave_workers_idle() -> None:
    assert kept([Made() for _ in range(5)], 1) == 2, "of those that three newer ones have replaced"
    assert kept([Made() for _ in range(5)], 2) == 0, "they take turns"
    assert kept([Subset(Made(), range(count)) for count in (1, 2, 3, 4)], 1) == 0, "of data of another size"
