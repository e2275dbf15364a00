"""What runs in a loader worker: stamps at three moments of each batch, stored into the worker's slot.

The way in is ``worker_init_fn``, which a worker calls before it makes its fetcher. What stands there is an object whose
call is a descriptor: looking the call up sets the worker up, and what is then called is the user's own function. No
frame of ours is on the stack while code of the user's runs, so that a worker's traceback, which travels as text in the
message of an exception, is the same to the letter. No thread, nothing in the batches, no random number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import monotonic_ns, thread_time_ns
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from gpuwatch.interruption import expected
from gpuwatch_hooks.disguise import same_but, set_class
from gpuwatch_hooks.fetching import timed_fetcher
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.worker_area import ENTRY, RING, RING_AT, Slot, WorkerArea

READING_NANOSECONDS = 500_000_000
"""How often a worker reads what the kernel tells of it (20 us each time)."""

QUICK_NANOSECONDS = 200_000
"""A batch that is made in less is quick: reading the time on a core would be noticed."""

MEMORY_NANOSECONDS = 10_000_000_000
"""How often it reads its memory, once it is warm; the kernel walks its pages for that."""

MEMORY_SHARE = 500
"""A reading of the memory is not repeated before this many times what it took."""


class _Call:
    """Looked up by the worker as it calls its ``worker_init_fn``."""

    def __get__(self, init: WorkerInit | None, kind: type | None = None) -> Any:
        if init is None:
            return self
        set_up(init)
        return id if init.own is None else init.own  # `id`: one argument, no effect


class WorkerInit:
    """Stands for the user's ``worker_init_fn`` while workers are started."""

    __slots__ = ("area", "batch_size", "home", "own")
    __call__ = _Call()

    def __init__(self, own: object, area: WorkerArea | None, batch_size: int | None, home: int) -> None:
        self.own = own
        self.area = area
        self.batch_size = batch_size
        self.home = home  # the training process

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        child = None if self.area is None else self.area.to_child()
        return _received, (self.own, self.batch_size, self.home, *(child or ()))


def _received(own: object, batch_size: int | None, home: int, make: Any = None, arguments: Any = ()) -> WorkerInit:
    return WorkerInit(own, area_of(make, arguments), batch_size, home)


@guarded("workers")
def area_of(make: Any, arguments: Any) -> WorkerArea | None:
    """The area that the training process made; None where it cannot be had."""
    area: WorkerArea | None = None if make is None else make(*arguments)
    return area


@guarded("workers")
def set_up(init: WorkerInit) -> None:
    """Watch the fetchers and the queues of this worker."""
    info = get_worker_info()
    loop = _worker_loop(sys._getframe())
    if info is None or loop is None or init.area is None or os.getpid() == init.home:
        return
    area, init.area = init.area, None  # once: a wrapper of the user's may call it again
    begin, collate, end = stamps(area.slot(info.id), init.batch_size or 1)
    counted = init.batch_size is None
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        setattr(fetch, name, timed_fetcher(getattr(fetch, name), begin, collate, counted, info.dataset))
    queue = loop.f_locals["data_queue"]
    kind = type(queue)

    def put(self: Any) -> object:
        end()
        return kind.put.__get__(self)

    set_class(queue, same_but(kind, {"put": property(put)}))


def _worker_loop(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not (frame.f_code.co_name == "_worker_loop" and "data_queue" in frame.f_locals):
        frame = frame.f_back
    return frame


def stamps(slot: memoryview, usual: int) -> tuple[Callable[[], None], Callable[[int], None], Callable[[], None]]:
    """What is done as a batch's items are begun, as they are collated, and as the batch is handed over.

    ``usual`` is the number of items of a batch that were not counted.
    """
    words = slot
    batches = items = items_time = collate_time = cpu_time = 0
    count = cpu_begun = begun = collating = 0
    running, quick = 1.0, False  # share of the last measured batch's time on a core; whether the last one was quick
    reader = _Reader(words)
    due = monotonic_ns()
    words[Slot.PID] = os.getpid()
    words[Slot.STARTED] = due
    busy_since, last_end = int(Slot.BUSY_SINCE), int(Slot.LAST_END)

    def begin() -> None:
        nonlocal begun, cpu_begun, collating
        collating = 0
        # Of quick batches a few are enough: the kernel takes longer to tell the time on a core than all else here.
        cpu_begun = 0 if quick and batches & 7 else thread_time_ns()
        words[busy_since] = begun = monotonic_ns()

    def collate(counted: int) -> None:
        nonlocal collating, count
        count = counted or usual
        collating = monotonic_ns()

    def end() -> None:
        nonlocal batches, items, items_time, collate_time, cpu_time, collating, due, running, quick
        now = monotonic_ns()
        words[busy_since] = 0
        if not collating:
            return  # no batch: an exception, the end of a stream, an answer
        at = RING_AT + batches % RING * ENTRY
        words[at] = spent = collating - begun
        words[at + 1] = collated = now - collating
        words[at + 2] = count
        made = now - begun
        quick = made < QUICK_NANOSECONDS
        if cpu_begun:
            running = (thread_time_ns() - cpu_begun) / (made or 1)
        batches += 1
        items += count
        items_time += spent
        collate_time += collated
        cpu_time += int(made * running)
        collating = 0
        words[2] = batches
        words[last_end] = now
        if not quick or not batches & 7:
            words[3], words[4], words[5], words[6] = items, items_time, collate_time, cpu_time
        if now >= due:
            due = now + READING_NANOSECONDS
            read(reader, now)

    return begin, collate, end


class _Reader:
    """What the kernel tells of this worker."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.memory_due = 0
        self.memory_every = READING_NANOSECONDS
        self.waited = _core_wait()  # while it started


@guarded("workers")
def read(reader: _Reader, now: int) -> None:
    """Store the wait for cores, what its children used, and now and then the memory."""
    words = reader.words
    try:
        spent = os.times()
        words[Slot.CHILDREN_TIME] = int((spent.children_user + spent.children_system) * 1e9)
        words[Slot.CORE_WAIT] = _core_wait() - reader.waited
        if now < reader.memory_due:
            return
        begun = monotonic_ns()
        words[Slot.RESIDENT], words[Slot.UNIQUE] = memory()
        took = monotonic_ns() - begun
        reader.memory_due = now + max(reader.memory_every, MEMORY_SHARE * took)
        reader.memory_every = min(2 * reader.memory_every, MEMORY_NANOSECONDS)
    except expected(OSError, ValueError, IndexError):
        pass  # the kernel does not tell, or no descriptor is free


def _core_wait() -> int:
    """Nanoseconds that this thread was ready and had no core."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except expected(OSError, ValueError, IndexError):
        return 0  # this kernel keeps no such sums


def memory() -> tuple[int, int]:
    """Bytes of this process that are in memory, and those of them that no other process has too."""
    resident = unique = 0
    with open("/proc/self/smaps_rollup", "rb") as file:
        for line in file:
            name, _, rest = line.partition(b":")
            if name == b"Rss":
                resident = int(rest.split()[0]) * 1024
            elif name.startswith(b"Private_"):
                unique += int(rest.split()[0]) * 1024
    return resident, unique
