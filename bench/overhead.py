"""What watching adds to a training step, beside the floor: the cheapest hooks that could see the same moments.

Blocks of steps in turn: bare, floor, bare, watched, … The machine's speed drifts, so each watched block is compared
with the bare blocks around it, and medians are taken over rounds. The first steps after attach are measured apart:
they are all looked at, later steps rest.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from time import monotonic_ns, perf_counter_ns

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

STEPS = 2000
SETTLED = 1000
"""Steps left out at the start of a block."""

Run = Callable[[], list[int]]


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
        bare.append(settled(between))
        floor.append(settled(with_floor) - (settled(before) + settled(between)) / 2)
        watched.append(settled(with_watch) - (settled(between) + settled(after)) / 2)
        dense.append(statistics.fmean(with_watch[:60]) - (settled(between) + settled(after)) / 2)
    return [
        f"overhead: bare step {_us(bare)}; watched +{_us(watched)} a step; floor (bare hooks, clock, record) "
        f"+{_us(floor)}; each of the first 64 steps +{_us(dense)}   "
        f"[medians of {rounds} rounds of mean times over {STEPS - SETTLED} steps]"
    ]


def training() -> tuple[nn.Module, DataLoader[tuple[torch.Tensor, ...]], Run]:
    """A four-layer MLP on tensors in memory, and a function that trains it and returns nanoseconds per step."""
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

    def run() -> list[int]:
        times = []
        begun = perf_counter_ns()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            ended = perf_counter_ns()
            times.append(ended - begun)
            begun = ended
            if len(times) == STEPS:
                break
        return times

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


def settled(times: list[int]) -> float:
    """Mean step of a block after its first steps, the slowest hundredth (the machine's own hiccups) left out."""
    kept = sorted(times[SETTLED:])
    return statistics.fmean(kept[: len(kept) - len(kept) // 100])


def _us(nanoseconds: list[float]) -> str:
    return f"{statistics.median(nanoseconds) / 1000:.1f} us"
