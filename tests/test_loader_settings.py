"""Loaders that answer anything to any name, or nothing, or raise: they are watched, and none of their code is run."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch
from gpuwatch.catalog import LOADER_BATCH, LOADER_WORKERS
from gpuwatch_hooks.settings import items, setting
from tests.loops import perceptron

pytestmark = pytest.mark.usefixtures("records")


class Hostile:
    """Raises whatever is asked of it."""

    def __init__(self, inner: Any) -> None:
        self.__dict__["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")

    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError("read only")

    def __eq__(self, other: object) -> bool:
        raise TypeError

    def __hash__(self) -> int:
        raise TypeError

    def __bool__(self) -> bool:
        raise TypeError

    def __len__(self) -> int:
        raise RuntimeError

    @property
    def batch_size(self) -> int:
        raise RuntimeError("not yet")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__["inner"])


@dataclasses.dataclass(frozen=True)
class Slotted:
    """Keeps what it has in slots."""

    __slots__ = ("batch_size", "inner")
    batch_size: int
    inner: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def plain() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(60, 8)), batch_size=5)


@pytest.mark.parametrize("make", [Hostile, lambda inner: Slotted(7, inner)])
def test_a_loader_that_dislikes_questions_is_watched(make: Any) -> None:
    loader = make(plain())
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    assert watch._run is not None
    values = watch._run.session.snapshot().values
    watch.detach()
    assert values[LOADER_WORKERS.name] == 0, "that of the loader within"
    assert values[LOADER_BATCH.name] == 5


def test_only_what_is_stored_is_read() -> None:
    class Base:
        num_workers = 3

        def batch_size(self) -> int:
            raise AssertionError

    class Own(Base):
        __slots__ = ("prefetch_factor",)

    loader = Own()
    assert setting(loader, "num_workers") == 3
    assert setting(loader, "batch_size") is None, "a method"
    assert setting(loader, "prefetch_factor") is None, "an empty slot"
    loader.prefetch_factor = 4  # type: ignore[attr-defined]
    assert setting(loader, "prefetch_factor") == 4
    assert setting(Hostile([]), "dataset") is None and items(Hostile([])) is None


def test_the_way_workers_are_started_is_asked_of_the_loader_within() -> None:
    context = multiprocessing.get_context("spawn")
    inner = DataLoader(TensorDataset(torch.ones(4, 8)), num_workers=1, multiprocessing_context=context)
    with gpuwatch.attach(perceptron(), loader := Hostile(inner)) as watch:
        assert sum(1 for _ in loader) == 4
        assert watch._run is not None
        (known,) = watch._run.session.loaders
        assert known.context is context


class Touchy:
    """A batch that dislikes to be looked at."""

    def __init__(self, inputs: torch.Tensor) -> None:
        object.__setattr__(self, "inputs", inputs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError

    def __getattribute__(self, name: str) -> Any:
        if name != "inputs":
            raise RuntimeError(name)
        return object.__getattribute__(self, name)


def test_a_batch_that_dislikes_to_be_looked_at_passes() -> None:
    def collate(rows: list[tuple[torch.Tensor]]) -> Touchy:
        return Touchy(torch.stack([row for (row,) in rows]))

    loader = DataLoader(TensorDataset(torch.ones(60, 8)), 5, collate_fn=collate)
    with gpuwatch.attach(perceptron(), loader):
        assert all(batch.inputs.shape == (5, 8) for batch in loader)
