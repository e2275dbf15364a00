"""Blocks that were never freed: whose they are, and whether every step adds some."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from dataclasses import dataclass

from gpuwatch.allocator.replay import Replay
from gpuwatch.allocator.shapes import Action, DeviceRecord, Owner

FEWEST_STEPS = 5
"""Below, what grows by step cannot be told from what a first step allocates once."""

STEP_MARK = "Optimizer.step"
BACKWARD, FORWARD = "backward", "forward"


@dataclass(frozen=True)
class Kept:
    """Blocks of one owner that the trace allocates and does not free. Sizes in bytes."""

    owner: Owner
    blocks: int
    size: int
    bytes_per_step: int | None
    """What every step adds; None when it does not, or when too few steps were seen to say."""


@dataclass(frozen=True)
class Lifetimes:
    """What stays, and how many steps that was judged by."""

    steps: int
    kept: tuple[Kept, ...]


def lifetimes(device: DeviceRecord, replayed: Replay, owners: tuple[Owner, ...]) -> Lifetimes:
    """The blocks that a trace leaves behind, those of growing owners first."""
    trace = device.trace
    born: dict[int, int] = {}
    alloc, freed = int(Action.ALLOC), int(Action.FREE_COMPLETED)
    for index, (action, address) in enumerate(zip(trace.actions, trace.addresses, strict=True)):
        if action == alloc:
            born[address] = index
        elif action == freed:
            born.pop(address, None)
    borders = step_borders(device, owners)
    steps = len(borders) + 1 if borders else 1
    by_owner: dict[int, dict[int, int]] = {}
    counts: dict[int, int] = {}
    for index in born.values():
        stack = trace.stacks[index]
        step = bisect_right(borders, index)
        sizes = by_owner.setdefault(stack, {})
        sizes[step] = sizes.get(step, 0) + (replayed.block_sizes[index] or trace.sizes[index])
        counts[stack] = counts.get(stack, 0) + 1
    kept = [
        Kept(owners[stack], counts[stack], sum(sizes.values()), _growth(sizes, steps))
        for stack, sizes in by_owner.items()
    ]
    kept.sort(key=lambda entry: (entry.bytes_per_step or 0, entry.size), reverse=True)
    return Lifetimes(steps, tuple(kept))


def _growth(sizes: dict[int, int], steps: int) -> int | None:
    """What each step but the first (which warms up) and the last (which is not over) leaves behind."""
    if steps < FEWEST_STEPS:
        return None
    middle = [sizes.get(step, 0) for step in range(1, steps - 1)]
    return int(statistics.median(middle)) if all(middle) else None


def step_borders(device: DeviceRecord, owners: tuple[Owner, ...]) -> list[int]:
    """Events before which a new step begins: after each marked optimizer step, else where backward turns to forward."""
    trace = device.trace
    ends = sorted(mark.time_us for mark in device.marks if not mark.start and mark.name.startswith(STEP_MARK))
    if ends:
        borders = {bisect_right(trace.times_us, time) for time in ends}
        return sorted(border for border in borders if 0 < border < len(trace))
    borders_found = []
    behind = False
    for index, (action, stack) in enumerate(zip(trace.actions, trace.stacks, strict=True)):
        if action != Action.ALLOC:
            continue
        category = owners[stack].category
        if category == BACKWARD:
            behind = True
        elif category == FORWARD and behind:
            borders_found.append(index)
            behind = False
    return borders_found
