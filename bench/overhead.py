"""What watching adds to a training step, beside the floor: the cheapest hooks that could see the same moments.

Blocks of steps in turn: bare, floor, bare, watched, … The machine's speed drifts, so each watched block is compared
with the bare blocks around it, and medians are taken over rounds. The first steps after attach are measured apart:
they are all looked at, later steps rest.

Two figures, since most steps rest and a few are looked at: the mean of the CPU time that the training thread takes,
which has all in it that watching does there, looks, searches and readings, and the median step by the clock.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns, perf_counter_ns, thread_time_ns

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

STEPS = 2000
SETTLED = 1000
"""Steps left out at the start of a block."""


@dataclass(frozen=True)
class Block:
    """Steps in a row: nanoseconds of each of them by the clock, and the mean CPU time of the settled ones."""

    steps: list[int]
    mean_cpu: float

    @property
    def median(self) -> float:
        """The median of the settled steps, in nanoseconds."""
        return statistics.median(self.steps[SETTLED:])


Run = Callable[[], Block]


def overhead_lines(rounds: int) -> list[str]:
    """The overhead of watching loader, model and optimizer of a four-layer MLP at batch 8."""
    os.environ.update(GPUWATCH_DIR=tempfile.mkdtemp(), GPUWATCH_DAEMON="0", GPUWATCH_QUIET="1")
    import gpuwatch

    torch.set_num_threads(1)
    model, loader, run = training()
    run()
    bare, floor, watched, dense = [], [], [], []
    for _ in range(rounds):
        before = run()
        remove = floor_hooks(model, loader)
        with_floor = run()
        remove()
        between = run()
        watch = gpuwatch.attach(model, loader)
        with_watch = run()
        watch.detach()
        after = run()
        bare.append((between.mean_cpu, between.median))
        floor.append(added(with_floor, before, between))
        watched.append(added(with_watch, between, after))
        dense.append(statistics.fmean(with_watch.steps[:60]) - (between.median + after.median) / 2)
    return [
        f"overhead: bare step {_us(bare)}; watched +{_us(watched)}; floor (bare hooks, clock, record) +{_us(floor)}; "
        f"each of the first 64 steps +{statistics.median(dense) / 1000:.1f} us   "
        f"[mean CPU time of the training thread, all included / median step by the clock; medians of {rounds} rounds "
        f"of {STEPS - SETTLED} steps]"
    ]


def added(block: Block, before: Block, after: Block) -> tuple[float, float]:
    """What a block's steps take beyond those around it, in nanoseconds: mean CPU time, and median by the clock."""
    return (
        block.mean_cpu - (before.mean_cpu + after.mean_cpu) / 2,
        block.median - (before.median + after.median) / 2,
    )


def training() -> tuple[nn.Module, DataLoader[tuple[torch.Tensor, ...]], Run]:
    """A four-layer MLP on tensors in memory, and a function that trains it and returns what its steps took."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(torch.randn(8 * 4000, 64), torch.randint(0, 10, (8 * 4000,))), batch_size=8)

    def run() -> Block:
        times: list[int] = []
        settled = thread_time_ns()
        begun = perf_counter_ns()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            ended = perf_counter_ns()
            times.append(ended - begun)
            begun = ended
            if len(times) == SETTLED:
                settled = thread_time_ns()
            if len(times) == STEPS:
                break
        return Block(times, (thread_time_ns() - settled) / (STEPS - SETTLED))

    return model, loader, run


def floor_hooks(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> Callable[[], None]:
    """Loader, root forward and optimizer with a clock reading each, and one record of three numbers a step."""
    seen = [0] * 6
    values = memoryview(bytearray(64)).cast("d")

    def forward_begin(module: nn.Module, arguments: object) -> None:
        seen[0] = monotonic_ns()

    def forward_end(module: nn.Module, arguments: object, output: object) -> None:
        seen[1] = monotonic_ns()

    def step_begin(optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        seen[2] = monotonic_ns()

    def step_end(optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        seen[3] = now = monotonic_ns()
        values[0], values[1], values[2] = now, seen[1] - seen[0], now - seen[2]

    class Timed(_SingleProcessDataLoaderIter):
        def __next__(self) -> object:
            seen[4] = monotonic_ns()
            batch = super().__next__()
            seen[5] = monotonic_ns()
            return batch

    class TimedLoader(DataLoader[tuple[torch.Tensor, ...]]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            iterator = super().__iter__()
            iterator.__class__ = Timed
            return iterator

    original = type(loader)
    loader.__class__ = TimedLoader
    handles = (
        model.register_forward_pre_hook(forward_begin),
        model.register_forward_hook(forward_end),
        register_optimizer_step_pre_hook(step_begin),
        register_optimizer_step_post_hook(step_end),
    )

    def remove() -> None:
        loader.__class__ = original
        for handle in handles:
            handle.remove()

    return remove


def _us(pairs: list[tuple[float, float]]) -> str:
    return " / ".join(f"{statistics.median(column) / 1000:.1f}" for column in zip(*pairs, strict=True)) + " us"
