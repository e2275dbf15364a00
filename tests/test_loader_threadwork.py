"""What the training thread itself does for a batch: the sampler, and taking it from a worker."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import gpuwatch
from gpuwatch.catalog import LOADER_ORDER_SECONDS, LOADER_PART_SECONDS, LOADER_RECEIVE_CPU_SECONDS
from gpuwatch.delivery import Setting
from gpuwatch.expr import series_key
from gpuwatch.loadercosts import MeanStep, batch_costs, mean_seconds, own_ratio
from gpuwatch.reader import Snapshot
from gpuwatch.window import Steps
from gpuwatch_hooks.sampling import NAME
from tests.loops import perceptron

pytestmark = [pytest.mark.usefixtures("records"), pytest.mark.filterwarnings("ignore:This DataLoader will create")]

SLEEP = 0.004
ORDER = 0.02
SAMPLER = series_key(LOADER_PART_SECONDS.name, {"part": "sampler"})


class Rows(Dataset[Any]):
    """Items that cost nothing."""

    def __init__(self, payload: int = 0) -> None:
        self.payload = payload

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        return {str(number): [index, number] for number in range(self.payload)} if self.payload else torch.ones(8)


class Late(Sampler[int]):
    """An order that takes long to draw, and indices that are late."""

    def __init__(self, order: float, each: float, fails_at: int | None = None) -> None:
        self.order = order
        self.each = each
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        time.sleep(self.order)
        for index in range(60):
            if index == self.fails_at:
                raise LookupError("no such bucket")
            if index >= 8:  # what is handed out ahead belongs to the order
                time.sleep(self.each)
            yield index


def trained(loader: Any, given: bool, epochs: int = 1) -> Snapshot:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader if given else None)
    for _ in range(epochs):
        for inputs in loader:
            optimizer.zero_grad()
            model(inputs if isinstance(inputs, torch.Tensor) else torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
    assert watch._run is not None
    snapshot = watch._run.session.snapshot()
    watch.detach()
    return snapshot


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_sampler_is_told_from_the_items(workers: int, given: bool) -> None:
    loader = DataLoader(Rows(), 2, sampler=Late(ORDER, SLEEP), num_workers=workers)
    values = trained(loader, given, epochs=2).values
    assert values[SAMPLER] >= 2 * SLEEP
    assert values[LOADER_ORDER_SECONDS.name] >= ORDER
    items = values[series_key(LOADER_PART_SECONDS.name, {"part": "items"})]
    assert items < values[SAMPLER]


def test_a_batch_sampler_and_persistent_workers_are_timed_too() -> None:
    class Pairs(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            for index in range(30):
                time.sleep(SLEEP)
                yield [index, index + 1]

    loader = DataLoader(Rows(), batch_sampler=Pairs(), num_workers=1, persistent_workers=True)
    values = trained(loader, True, epochs=2).values
    assert values[SAMPLER] >= SLEEP
    assert values[LOADER_ORDER_SECONDS.name] >= 2 * SLEEP, "two batches are handed out ahead"


def test_the_iterator_has_its_own_sampler_back_after_each_batch() -> None:
    loader = DataLoader(Rows(), 2, sampler=Late(0, 0), num_workers=0)
    with gpuwatch.attach(perceptron(), loader):
        iterator = iter(loader)
        own = vars(iterator)[NAME]
        next(iterator)
        assert vars(iterator)[NAME] is own
        next(iterator)
        assert vars(iterator)[NAME] is own


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_the_sampler_comes_through_the_same_frames(workers: int) -> None:
    def frames() -> list[str]:
        with pytest.raises(LookupError) as caught:
            list(DataLoader(Rows(), 2, sampler=Late(0, 0, fails_at=9), num_workers=workers))
        found = traceback.extract_tb(caught.value.__traceback__)
        return [frame.name for frame in found if "gpuwatch_hooks" not in frame.filename or frame.name != "__next__"]

    expected = frames()
    with gpuwatch.attach(perceptron()):
        assert frames() == expected


def test_unpickling_is_time_of_the_training_thread() -> None:
    objects = trained(DataLoader(Rows(400), 20, num_workers=1, collate_fn=list), True, epochs=3).values
    tensors = trained(DataLoader(Rows(), 20, num_workers=1), True, epochs=3).values
    assert objects[LOADER_RECEIVE_CPU_SECONDS.name] > 2 * tensors[LOADER_RECEIVE_CPU_SECONDS.name]


# -- what it means for the setting -----------------------------------------------------------------------------------


def test_no_worker_is_asked_to_do_what_the_sampler_does() -> None:
    step = MeanStep(total=0.020, waiting=0.014, training=0.006, batches=1)
    assert mean_seconds({}, step, Setting(0, 2)) == pytest.approx(0.014)
    assert mean_seconds({SAMPLER: 0.012}, step, Setting(0, 2)) == pytest.approx(0.002)


def test_the_sampler_and_unpickling_are_costs_of_the_training_thread() -> None:
    from gpuwatch.catalog import LOADER_BATCH_CPU_SECONDS, LOADER_BATCH_SECONDS, TRAINING_CORES

    values = {
        LOADER_BATCH_CPU_SECONDS.name: 0.001,
        TRAINING_CORES.name: 0.5,
        series_key(LOADER_BATCH_SECONDS.name, {"quantile": "0.5"}): 0.002,
    }
    step = MeanStep(total=0.020, waiting=0.014, training=0.006, batches=1)
    bare = batch_costs(values, step, 10.0, Setting(2, 2))
    slow = batch_costs({**values, SAMPLER: 0.003, LOADER_RECEIVE_CPU_SECONDS.name: 0.004}, step, 10.0, Setting(2, 2))
    assert bare is not None and slow is not None
    assert slow.receiving - bare.receiving == pytest.approx(0.003 + 0.004 - bare.receiving)


def test_what_is_the_training_threads_own_of_a_wait() -> None:
    steps = Steps([0.030] * 100, [0.020] * 100, [0.0] * 100, [1.0] * 100)
    assert own_ratio({SAMPLER: 0.012, LOADER_RECEIVE_CPU_SECONDS.name: 0.004}, steps) == pytest.approx(0.8)
    assert own_ratio({SAMPLER: 0.1}, steps) == 1
    assert own_ratio({}, steps) is None
    none = Steps([0.030] * 100, [0.0] * 100, [0.0] * 100, [1.0] * 100)
    assert own_ratio({SAMPLER: 0.0005}, none) == pytest.approx(0.1), "of a wait that is none, it is little"
    assert own_ratio({SAMPLER: 0.0005}, Steps([0.1] * 3, [0.1] * 3, [0.0] * 3, [1.0] * 3)) is None
