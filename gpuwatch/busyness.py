"""How busy a rank is of which no hook sees anything: is it stuck, or does it work on something that nobody told us of?

A tokenization, a compilation, a search through files between two epochs may take longer than any step. Whoever waits in
a collective, for a lock or for a storage takes no CPU time; whoever works does, or its children do, or on a crowded
machine at least wants to. On an accelerator that is not enough: the main thread may wait for it in a loop, so there the
accelerator has to be idle too.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

from gpuwatch.mainthread import PROCESSES
from gpuwatch.nvml import GpuReading
from gpuwatch.recordparts import RecordError, Snapshot, holder, opened
from gpuwatch.standing import SILENT_SECONDS

WINDOW_SECONDS = 120.0
"""What is said is a mean over so long: whoever stops to work is no longer busy soon after."""

LEAST_SECONDS = 20.0
"""Over less nothing is said."""

MOST_PROCESSES = 256
"""Of a rank and its children that are looked at."""

_TICKS = os.sysconf("SC_CLK_TCK")

Reading = tuple[float, float]
"""A time, monotonic, and the seconds of work until then."""


class Busyness:
    """Follows silent ranks from one scrape to the next. For one thread at a time."""

    def __init__(self, processes: Path = PROCESSES) -> None:
        self._processes = processes
        self._silent: dict[Path, tuple[float, deque[Reading]]] = {}

    def cores(self, rank: Snapshot, gpus: Sequence[GpuReading]) -> float | None:
        """The cores that a living rank keeps busy; None where it is not silent, or where that says nothing."""
        if rank.progress_age < SILENT_SECONDS:
            self._silent.pop(rank.path, None)
            return None
        pid = _process_of(rank.path)
        if not pid or not (rank.identity.get("device") == "cpu" or _idle(pid, gpus)):
            self._silent.pop(rank.path, None)
            return None
        seen = rank.run_seconds  # grows with every sign of life
        since, readings = self._silent.get(rank.path, (seen, deque()))
        if since != seen:
            readings = deque()
        self._silent[rank.path] = seen, readings
        spent = work_seconds(pid, self._processes)
        if spent is None:
            return None
        now = time.monotonic()
        readings.append((now, spent))
        while len(readings) > 2 and now - readings[1][0] >= WINDOW_SECONDS:
            readings.popleft()
        began, before = readings[0]
        return max(0.0, spent - before) / (now - began) if now - began >= LEAST_SECONDS else None

    def keep(self, living: Collection[Path]) -> None:
        """Forget those that live no more."""
        self._silent = {path: known for path, known in self._silent.items() if path in living}


def work_seconds(pid: int, processes: Path = PROCESSES) -> float | None:
    """The time that a process and its children were on a core or waited for one; None where it cannot be told.

    Children that are gone and were waited for count too. Of the waits those of the main threads are known.
    """
    total, left, looked = 0.0, [pid], 0
    while left and looked < MOST_PROCESSES:
        place = processes / str(left.pop())
        looked += 1
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / _TICKS
            total += int((place / "schedstat").read_text().split()[1]) / 1e9
            left += map(int, (place / "task" / place.name / "children").read_text().split())
        except (OSError, ValueError, IndexError):
            continue  # gone meanwhile, or a kernel that does not tell all of it
    return total or None


def _process_of(record: Path) -> int | None:
    try:
        with opened(record) as (file, _):
            return holder(file)
    except (OSError, RecordError):
        return None


def _idle(pid: int, gpus: Sequence[GpuReading]) -> bool:
    """Whether no GPU that this process uses runs a kernel; False where none is known to be its own."""
    own = [gpu for gpu in gpus if any(process == pid for process, _ in gpu.processes or ())]
    return bool(own) and all(gpu.utilization_ratio == 0 for gpu in own)
