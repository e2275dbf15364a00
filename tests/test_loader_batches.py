"""What a loader gives is the same, to the bit, whether it is watched, found or left alone."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import gpuwatch
from tests.loadkinds import KINDS, persistent, stateful
from tests.outcomes import digest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")

Make = Callable[[], Any]


def given(make: Make, epochs: int, watch: Callable[[Any], object] = lambda loader: None) -> tuple[list[str], list[str]]:
    """Digests of the batches of a new loader, and of the generators' states afterwards."""
    torch.manual_seed(11)
    random.seed(12)
    numpy.random.seed(13)
    loader = make()
    watch(loader)
    batches = [digest(batch) for _ in range(epochs) for batch in loader]
    state: Any = numpy.random.get_state()
    return batches, [digest(torch.get_rng_state()), digest(random.getstate()), digest(state[1].tolist())]


def same(make: Make, epochs: int = 1) -> None:
    """Compare a loader that is left alone with one that is given to attach and one that is not."""
    expected = given(make, epochs)
    assert len(expected[0]) >= 5 * epochs
    model = nn.Linear(1, 1)
    with gpuwatch.attach(model):
        assert given(make, epochs) == expected, "found by itself"
        assert given(make, epochs, lambda loader: gpuwatch.attach(model, loader)) == expected, "given"
    assert given(make, epochs) == expected, "left alone again"


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_the_same(kind: str, workers: int, records: Path) -> None:
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    same(lambda: KINDS[kind](num_workers=workers, **options))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_are_the_same_over_epochs(workers: int, records: Path) -> None:
    same(lambda: persistent(num_workers=workers), epochs=2)
    same(lambda: KINDS["items"](num_workers=workers), epochs=2)


@pytest.mark.parametrize(("method", "workers"), [("spawn", 3), ("forkserver", 1)])
def test_batches_are_the_same_where_workers_are_no_forks(method: str, workers: int, records: Path) -> None:
    expected = given(lambda: persistent(num_workers=workers), 2)
    with gpuwatch.attach(nn.Linear(1, 1)):
        assert given(lambda: persistent(num_workers=workers, multiprocessing_context=method), 2) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_where_it_was_stopped(workers: int, records: Path) -> None:
    pytest.importorskip("torchdata")

    def halves(watch: Callable[[Any], object]) -> list[object]:
        torch.manual_seed(11)
        random.seed(12)
        numpy.random.seed(13)
        first, second = stateful(num_workers=workers), stateful(num_workers=workers)
        watch(first)
        seen: list[object] = []
        for number, batch in enumerate(first):
            seen.append(digest(batch["index"]))
            if number == 3:
                break
        state = first.state_dict()
        second.load_state_dict(state)
        watch(second)
        return [*seen, repr(state), *[digest(batch["index"]) for batch in second]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata's own
        expected = halves(lambda loader: None)
        assert len(expected) >= 8
        model = nn.Linear(1, 1)
        with gpuwatch.attach(model):
            assert halves(lambda loader: None) == expected
            assert halves(lambda loader: gpuwatch.attach(model, loader)) == expected
        same(lambda: stateful(num_workers=workers), epochs=2)


def test_nothing_of_ours_stays_in_torch(records: Path) -> None:
    iterate, make = vars(DataLoader)["__iter__"], dict(vars(torch.utils.data.dataloader._BaseDataLoaderIter))
    loader = KINDS["items"](num_workers=0)
    with gpuwatch.attach(nn.Linear(1, 1)):
        assert DataLoader.__iter__ is iterate, "seen from outside it is the same"
        iterator = iter(loader)
        next(iterator)
        assert type(iterator) is not torch.utils.data.dataloader._SingleProcessDataLoaderIter
    assert type(iterator) is torch.utils.data.dataloader._SingleProcessDataLoaderIter
    assert vars(DataLoader)["__iter__"] is iterate
    assert dict(vars(torch.utils.data.dataloader._BaseDataLoaderIter)) == make
    assert len(list(iterator)) == 7


def test_a_bound_iteration_can_be_kept_and_called_again(records: Path) -> None:
    loader = KINDS["items"](num_workers=0)
    with gpuwatch.attach(nn.Linear(1, 1)):
        bound = loader.__iter__
        assert bound.__self__ is loader and bound.__name__ == "__iter__"
        assert [len(list(bound())) for _ in range(2)] == [8, 8]
