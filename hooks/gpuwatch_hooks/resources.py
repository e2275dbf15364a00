"""What the node has left for loader workers: cores, memory and shared memory. Read about once a second."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from time import monotonic, process_time

from gpuwatch.catalog import HOST_AVAILABLE, SHARED_MEMORY_TOTAL, SHARED_MEMORY_USED, TRAINING_CORES
from gpuwatch.interruption import expected
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.cgroups import MemoryGroup, limited_memory
from gpuwatch_hooks.guard import guarded

SHARED_MEMORY = "/dev/shm"
"""Where torch's workers put the tensors of a batch."""

READINGS = 30
"""Readings that the training process's own CPU time is taken over: the recent half minute."""

FEWEST_SECONDS = 0.4
"""Time between the first reading and the last below which their difference says nothing."""


class ResourceProbe:
    """Cores the training process keeps busy itself, memory that is free, /dev/shm."""

    def __init__(self, record: RecordWriter) -> None:
        self.record = record
        self._groups = limited_memory()
        self._readings: deque[tuple[float, float]] = deque(maxlen=READINGS)

    @guarded("resources")
    def publish(self) -> None:
        """Write the readings that this system has."""
        cores = self._training_cores(monotonic(), process_time())
        available = available_bytes(self._groups)
        if cores is not None:
            self.record.values[self.record.series(TRAINING_CORES.name)] = cores
        if available is not None:
            self.record.values[self.record.series(HOST_AVAILABLE.name)] = available
        try:
            status = os.statvfs(SHARED_MEMORY)
        except expected(OSError):
            return  # no such thing here
        self.record.values[self.record.series(SHARED_MEMORY_TOTAL.name)] = status.f_blocks * status.f_frsize
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        self.record.values[self.record.series(SHARED_MEMORY_USED.name)] = used

    def _training_cores(self, now: float, used: float) -> float | None:
        """CPU seconds of all threads of this process (not of its workers) a second, since the first of the readings.

        The first is made a while after attach: what comes before is imports and warm-up.
        """
        self._readings.append((now, used))
        then, used_then = self._readings[0]
        return (used - used_then) / (now - then) if now - then >= FEWEST_SECONDS else None


def available_bytes(groups: Iterable[MemoryGroup]) -> int | None:
    """Bytes of host memory that can be had without swapping, on the machine and in these groups; None where untold."""
    known = [left for left in (_available(), *(group.left() for group in groups)) if left is not None]
    return min(known, default=None)


def _available() -> int | None:
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except expected(OSError, ValueError, IndexError):
        pass
    return None
