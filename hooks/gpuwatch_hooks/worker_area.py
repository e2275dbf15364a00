"""What loader workers tell: a small area of memory that the workers of one iterator share with the training process.

Each worker has a slot of 8-byte words and stores into its own alone; nothing goes through the batches. Stores of a
word are never torn. Words of a slot may be of different batches when they are read: medians and sums do not mind.
"""

from __future__ import annotations

import enum
import mmap
import os
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

RING = 64
"""Batches of which a slot keeps the times."""


class Slot(enum.IntEnum):
    """A worker's words. Times in nanoseconds, sums since the worker began."""

    PID = 0
    STARTED = 1  # when it was ready to load, CLOCK_MONOTONIC
    BATCHES = 2
    ITEMS = 3
    ITEM_TIME = 4
    COLLATE_TIME = 5
    CPU_TIME = 6  # of the thread that makes batches, while it makes them
    BUSY_SINCE = 7  # 0 while it waits to be asked
    LAST_END = 8
    CORE_WAIT = 9  # ready, but without a core; 0 where the kernel does not tell
    RESIDENT = 10  # bytes
    UNIQUE = 11
    CHILDREN_TIME = 12  # CPU time of processes that it started and that have ended: decoders, mostly


RING_AT = 16
"""Where the ring begins; of each batch (items' time, collate's time, number of items)."""

ENTRY = 3
SLOT_WORDS = RING_AT + RING * ENTRY


def cpu_time(words: memoryview) -> int:
    """Nanoseconds of CPU time that a worker has used to make batches, itself or by processes that it started."""
    return int(words[Slot.CPU_TIME] + words[Slot.CHILDREN_TIME])


class WorkerArea:
    """The area of an iterator's workers; ``shared`` where they are no forks and have to be handed a descriptor."""

    def __init__(self, workers: int, descriptor: int | None, mapped: mmap.mmap) -> None:
        self.workers = workers
        self._descriptor = descriptor
        self._words = memoryview(mapped).cast("q")

    @classmethod
    def create(cls, workers: int, shared: bool) -> WorkerArea:
        """Make one; raises OSError where the system refuses the memory."""
        size = workers * SLOT_WORDS * 8
        if not shared:
            return cls(workers, None, mmap.mmap(-1, size))  # a fork has it too
        descriptor = os.memfd_create("gpuwatch-workers", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            return cls(workers, descriptor, mmap.mmap(descriptor, size))
        except BaseException:
            os.close(descriptor)
            raise

    def slot(self, worker: int) -> memoryview:
        """The words of one worker."""
        return self._words[worker * SLOT_WORDS : (worker + 1) * SLOT_WORDS]

    def close_descriptor(self) -> None:
        """All workers have it: the mapping is enough from here on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close_descriptor()

    def to_child(self) -> tuple[Callable[..., WorkerArea], tuple[Any, int]] | None:
        """How to make this area again in the worker that is being spawned; None where none is."""
        if self._descriptor is None or get_spawning_popen() is None:
            return None
        return _received, (reduction.DupFd(self._descriptor), self.workers)


def _received(duplicate: Any, workers: int) -> WorkerArea:
    descriptor = duplicate.detach()
    try:
        return WorkerArea(workers, None, mmap.mmap(descriptor, workers * SLOT_WORDS * 8))
    finally:
        os.close(descriptor)
