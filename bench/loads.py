"""Synthetic loads on the data path: what an item, a batch and a step cost, and how fast a loop over them is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import default_collate

from gpuwatch.delivery import Setting

ITEMS = 8
"""Items of a batch."""

LEAST_STEPS = 16
"""Steps that a mean is taken of, at least."""

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """Milliseconds asleep (storage, a network, a device) and milliseconds of CPU time."""

    asleep: float = 0.0
    busy: float = 0.0

    def do(self, times: float = 1.0) -> None:
        """Take that time."""
        if self.asleep:
            time.sleep(times * self.asleep / 1000)
        if self.busy:
            until = time.thread_time() + times * self.busy / 1000
            while time.thread_time() < until:
                pass


@dataclass(frozen=True)
class Load:
    """What an item costs, collating a batch, and training on it. One item in ``skew`` costs ``factor`` times as much.

    ``poor`` are the numbers of workers of the watched runs from which a setting is recommended.
    """

    name: str
    item: Work
    collate: Work
    step: Work
    skew: int = 0
    factor: float = 1.0
    floats: int = 64
    poor: tuple[int, ...] = (0, 1)


LOADS = (
    Load("CPU-bound", item=Work(busy=1.5), collate=Work(), step=Work(asleep=8)),
    Load("I/O-bound", item=Work(asleep=4), collate=Work(), step=Work(asleep=8)),
    Load("mixed", item=Work(asleep=2, busy=0.6), collate=Work(), step=Work(asleep=8), poor=(0, 2)),
    Load("heavy collate", item=Work(), collate=Work(asleep=5, busy=8), step=Work(asleep=8)),
    Load("skewed items", item=Work(asleep=0.4), collate=Work(), step=Work(asleep=10), skew=40, factor=150, poor=(0, 2)),
    Load("tiny items", item=Work(), collate=Work(), step=Work(asleep=6), poor=(0, 2)),
    Load("CPU-bound, training on the CPU", item=Work(busy=1), collate=Work(), step=Work(busy=8)),
    Load("large batches", item=Work(asleep=3), collate=Work(), step=Work(asleep=10), floats=1 << 18),
)


class Items(Dataset[Batch]):
    """As many items as asked for, each as costly as the load says."""

    def __init__(self, load: Load, length: int) -> None:
        self.load = load
        self.length = length
        self.pixels = torch.ones(load.floats)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        # By chance, but the same item is always the same: a multiplicative hash of its index.
        costly = self.load.skew and index * 2654435761 % 2**32 % self.load.skew == 0
        self.load.item.do(self.load.factor if costly else 1.0)
        return self.pixels, torch.zeros(2)


class Collate:
    """Puts a batch together, and takes the load's time for it."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __call__(self, items: list[Batch]) -> Batch:
        self.work.do()
        batch: Batch = default_collate(items)
        return batch


class Training:
    """A small model, its optimizer, and a step that takes the load's time."""

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.load = load
        self.model = nn.Linear(8, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def loader(self, setting: Setting, batches: int) -> DataLoader[Batch]:
        """A loader of this many batches."""
        return DataLoader(
            Items(self.load, ITEMS * batches),
            batch_size=ITEMS,
            num_workers=setting.workers,
            prefetch_factor=setting.prefetch if setting.workers else None,
            collate_fn=Collate(self.load.collate),
        )

    def steps(self, loader: DataLoader[Batch]) -> Iterator[float]:
        """Train on each batch of a loader; the time of its end."""
        for pixels, targets in loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(pixels[:, :8]), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self.load.step.do()
            self.optimizer.step()
            yield time.perf_counter()


def step_milliseconds(load: Load, setting: Setting, seconds: float) -> float:
    """Mean step of a loop over the load once it runs evenly, measured for about this long."""
    training = Training(load)
    # What a worker makes ahead at the start is taken before the clock runs; so is its own start.
    warm_up = 10 + 2 * setting.workers * setting.prefetch
    ends: list[float] = []
    for end in training.steps(training.loader(setting, batches=100_000)):
        ends.append(end)
        if len(ends) > warm_up + LEAST_STEPS and end - ends[warm_up] > seconds:
            break
    return 1000 * (ends[-1] - ends[warm_up]) / (len(ends) - 1 - warm_up)
