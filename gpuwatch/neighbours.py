"""Whose processes are on a GPU: those of watched runs, with their children, and others.

It can be told only where a watched rank is among the processes that NVML names: then both number processes alike. In a
container that numbers its own apart, or on a GPU that no watched run uses, nothing is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from gpuwatch.lifecycle import Census
from gpuwatch.nvml import GpuReading

PERIOD_SECONDS = 10.0
"""Between two looks at the records."""

MOST_ANCESTORS = 32


def with_neighbours(read: Callable[[], Sequence[GpuReading]], directory: Path) -> Callable[[], list[GpuReading]]:
    """``read``, with the processes that belong to no watched run filled in. For one thread."""
    census = Census(directory)
    looked = 0.0
    watched: frozenset[int] = frozenset()

    def reading() -> list[GpuReading]:
        nonlocal looked, watched
        readings = read()  # first: where there is no NVML, records need not be read
        if not looked or time.monotonic() - looked >= PERIOD_SECONDS:
            looked = time.monotonic()
            try:
                snapshots, _ = census.take()
                watched = frozenset(snapshot.pid for snapshot in snapshots if snapshot.up)
            except OSError:
                watched = frozenset()
        return [replace(each, foreign_processes=foreign(each.processes, watched)) for each in readings]

    return reading


def foreign(
    processes: Sequence[tuple[int, int | None]] | None,
    watched: Collection[int],
    parent_of: Callable[[int], int | None] | None = None,
) -> tuple[tuple[int, int], ...] | None:
    """The processes that are neither watched nor descend from one that is, with their memory in bytes.

    None where it cannot be told.
    """
    if not processes or not any(pid in watched for pid, _ in processes):
        return None
    ask = parent_of or parent
    strangers = []
    for pid, size in processes:
        if _descends(pid, watched, ask):
            continue
        if size is None:
            return None
        strangers.append((pid, size))
    return tuple(strangers)


def parent(pid: int) -> int | None:
    """The parent of a process, None for one that is gone or not to be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _descends(pid: int, watched: Collection[int], ask: Callable[[int], int | None]) -> bool:
    current: int | None = pid
    for _ in range(MOST_ANCESTORS):
        if current is None or current <= 1:
            return False
        if current in watched:
            return True
        current = ask(current)
    return False
