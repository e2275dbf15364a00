"""Loaders of many kinds, of items that tell where they were made and what random numbers they got there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

CALLS: list[int] = []
"""What the user's ``worker_init_fn`` was called with, in this process."""

Item = dict[str, Any]


def item(index: int) -> Item:
    """What can be told of where an item is made; draws from all three generators."""
    worker = get_worker_info()
    return {
        "index": index,
        "worker": -1 if worker is None else worker.id,
        "seed": torch.initial_seed() if worker is not None else 0,
        "draws": (torch.rand(2), random.random(), float(numpy.random.rand())),
        "calls": torch.tensor([len(CALLS), *CALLS[-1:]]) if CALLS else torch.zeros(2),
        "threads": torch.get_num_threads() if worker is not None else 0,
    }


class Items(Dataset[Item]):
    """By index."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Item:
        return item(index)


class Several(Items):
    """By several indices at once."""

    def __getitems__(self, indices: list[int]) -> list[Item]:
        return [item(index) for index in indices]


class Stream(IterableDataset[Item]):
    """A stream that its workers share out; they end at different batches."""

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from map(item, range(first, 20, step))


class Nested(IterableDataset[Item]):
    """Loads its items with a loader of its own."""

    def __iter__(self) -> Iterator[Item]:
        yield from DataLoader(Items(), batch_size=None, shuffle=True)


class Twice(DataLoader[Item]):
    """A loader with an iteration of its own."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch, batch["index"] * 2


class Otherwise(DataLoader[Item]):
    """A loader that makes its iterator in its own way."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()


def first_and_rest(items: list[Item]) -> tuple[Item, list[int]]:
    """A collation of its own."""
    return items[0], [one["index"] for one in items[1:]]


def note_call(worker: int) -> None:
    """A ``worker_init_fn``."""
    CALLS.append(worker)
    random.random()


def _pipe() -> Any:
    return IterableWrapper(range(20)).shuffle().sharding_filter().map(item)


KINDS: dict[str, Callable[..., Any]] = {
    "items": lambda **options: DataLoader(Items(), 3, shuffle=True, **options),
    "several at once": lambda **options: DataLoader(Several(), 3, drop_last=True, **options),
    "stream": lambda **options: DataLoader(Stream(), 3, **options),
    "data pipe": lambda **options: DataLoader(_pipe(), 3, shuffle=True, **options),
    "batch sampler": lambda **options: DataLoader(
        Items(), batch_sampler=BatchSampler(RandomSampler(Items()), 4, drop_last=False), **options
    ),
    "no batches": lambda **options: DataLoader(Items(), batch_size=None, shuffle=True, **options),
    "own collation": lambda **options: DataLoader(Items(), 3, collate_fn=first_and_rest, **options),
    "own iteration": lambda **options: Twice(Items(), 3, **options),
    "own iterator": lambda **options: Otherwise(Items(), 3, worker_init_fn=note_call, **options),
    "nested": lambda **options: DataLoader(Nested(), 3, **options),
    "generator": lambda **options: DataLoader(
        Items(), 3, shuffle=True, generator=torch.Generator().manual_seed(5), **options
    ),
}


def persistent(**options: Any) -> Any:
    """Workers that stay, with a ``worker_init_fn``."""
    stays: dict[str, Any] = {"persistent_workers": True} if options.get("num_workers") else {}
    return DataLoader(Stream(), 2, worker_init_fn=note_call, **stays, **options)


def stateful(**options: Any) -> Any:
    """torchdata's loader, which can be stopped and gone on with."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Items(), 3, shuffle=True, **options)
