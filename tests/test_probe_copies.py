"""Loader workers that copy a data set of Python objects by reading it, and those that share it."""

from __future__ import annotations

import os
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch.catalog import WORKER_COPIED
from gpuwatch_hooks.copy_on_write import own_pages
from gpuwatch_hooks.holdings import Holding, holdings
from tests.loops import found, only, perceptron

pytestmark = [
    pytest.mark.usefixtures("records"),
    pytest.mark.skipif(own_pages(os.getpid(), [id(object())]) is None, reason="this kernel does not tell of pages"),
]

RULE = "leak-host"
OBJECTS = 300_000
Item = tuple[torch.Tensor, torch.Tensor]


class Index(Dataset[Item]):
    """A data set that knows its items from an index, and reads of that ``reads`` entries an item."""

    def __init__(self, index: Any, reads: int = 96) -> None:
        self.index = index
        self.reads = reads

    def __len__(self) -> int:
        return 64 * 64

    def __getitem__(self, number: int) -> Item:
        at = number * 7919
        length = sum(len(str(self.index[(at + step * 101) % OBJECTS])) for step in range(self.reads))
        return torch.full((8,), float(length)), torch.zeros(2)


def paths() -> list[str]:
    """As a list of files is."""
    return [f"images/train/{number:09d}.jpg" for number in range(OBJECTS)]


def trained(dataset: Any, workers: int = 2, **options: Any) -> tuple[list[Finding], dict[str, float]]:
    """An epoch of 64 steps: what was found, and the last readings."""
    model = perceptron()
    loader = DataLoader(dataset, batch_size=64, num_workers=workers, **options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if watch._run is not None and watch._run.session.clock.steps in (20, 40, 60):
            watch._run.session.publish()
    assert watch._run is not None
    values = dict(watch._run.session.snapshot().values)
    watch.detach()
    return watch.findings(), values


def test_a_list_of_strings_is_found_and_named() -> None:
    findings, values = trained(Subset(Index(paths()), range(64 * 64)))
    finding = only(findings, RULE)
    assert finding.where == "Subset.dataset.index (list)"
    assert "2 loader workers hold copies" in finding.evidence and "300,000 Python objects" in finding.evidence
    assert finding.fix.startswith("Keep what the data set knows of its items in arrays")
    assert values[WORKER_COPIED.name] > 32 << 20


def test_an_array_of_objects_is_found() -> None:
    findings, _ = trained(Index(numpy.array(paths(), dtype=object)))
    assert "array of objects" in only(findings, RULE).where


def test_an_array_of_bytes_is_quiet() -> None:
    findings, values = trained(Index(numpy.array([path.encode() for path in paths()])))
    assert not found(findings, RULE) and WORKER_COPIED.name not in values


def test_a_list_that_workers_hardly_read_is_quiet() -> None:
    findings, values = trained(Index(paths(), reads=1))
    assert not found(findings, RULE) and values.get(WORKER_COPIED.name, 0.0) < 32 << 20


def test_a_list_read_by_the_training_process_alone_is_quiet() -> None:
    findings, values = trained(Index(paths(), reads=8), workers=0)
    assert not found(findings, RULE) and WORKER_COPIED.name not in values


# -- what a data set holds ---------------------------------------------------------------------------------------------


def largest(dataset: object) -> Holding:
    """The largest collection that was found in it."""
    return holdings(dataset)[0]


def test_the_size_of_a_collection_is_that_of_its_objects() -> None:
    strings = largest(Index(paths()))
    assert strings.estimated_bytes == pytest.approx(OBJECTS * paths()[0].__sizeof__(), rel=0.05)
    records = largest(Index([{"file": path, "label": number % 10} for number, path in enumerate(paths())]))
    assert (
        1.5 < records.estimated_bytes / strings.estimated_bytes < 2.5
    )  # a dict's head beside its string, not its table


def test_what_all_elements_share_is_counted_once() -> None:
    assert largest(Index(["one and the same"] * OBJECTS)).estimated_bytes < 1 << 20


def test_collections_are_found_in_containers_and_wrappers() -> None:
    tables = Index({"train": tuple(range(1000, 21_000)), "names": ["a", "b"]})
    (found_one,) = holdings([Subset(tables, [0])])
    assert found_one.name == "list[0].dataset.index['train'] (tuple)" and found_one.objects == 20_000


def test_tensors_arrays_and_short_lists_hold_no_objects() -> None:
    for kept in (torch.zeros(100_000), numpy.zeros(100_000), list(range(5000)), "x" * 100_000, None):
        assert not holdings(Index(kept))


class Hostile:
    """Whatever it is asked, it fails."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("do not touch")

    def __len__(self) -> int:
        raise RuntimeError("do not count")


def test_hostile_objects_are_passed_by() -> None:
    assert [one.objects for one in holdings(Index([[Hostile()] * 3, list(range(12_000))]))] == [12_000]
