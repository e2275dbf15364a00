"""Where the time of a batch goes, as the training thread sees it: what is measured at the fetches that are looked at.

Without workers the fetcher of torch's iterator is timed during a look; with them, whether a batch was ready when it
was asked for, and how long it then took to come over.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from time import monotonic_ns, thread_time_ns
from typing import Any

from gpuwatch.interruption import expected
from gpuwatch_hooks.disguise import can_subclass, original_class, set_class
from gpuwatch_hooks.fetching import timed_fetcher
from gpuwatch_hooks.holdings import attributes_of
from gpuwatch_hooks.sampling import SamplerTimes
from gpuwatch_hooks.worker_area import Slot
from gpuwatch_hooks.workers import Made, WorkerGroup

KEPT = 64
"""Fetches of which the parts are kept."""


class FetchParts:
    """The parts of the fetches of one loader."""

    def __init__(self) -> None:
        self.made: deque[Made] = deque(maxlen=KEPT)
        self.cpu: deque[int] = deque(maxlen=KEPT)
        self.ready: deque[bool] = deque(maxlen=KEPT)
        self.transfer: deque[int] = deque(maxlen=KEPT)
        self.pinning: deque[int] = deque(maxlen=KEPT)
        self.receive_cpu: deque[int] = deque(maxlen=KEPT)
        self._begun = self._collating = self._collated = self._cpu = self._count = 0
        self.split = False  # items and collation were told apart
        self._whole: int | None = None  # items of a batch of which no more than the whole time can be told
        self._ready: bool | None = None
        self._fetcher: Any = None
        self._kinds: dict[type, type] = {}
        self.sampler = SamplerTimes()

    def take(self, other: FetchParts) -> None:
        """Go on with what was measured of a loader that came before."""
        self.made = deque([*other.made, *self.made], maxlen=KEPT)
        self.cpu = deque([*other.cpu, *self.cpu], maxlen=KEPT)
        self.sampler.take(other.sampler)

    def begin(
        self, iterator: Any, usual: int | None, workers: int | None, group: WorkerGroup | None, first: bool
    ) -> None:
        """A batch is asked for, during a look. ``usual`` is the batch size, where one is known."""
        self._collating = self._collated = 0
        self._count = usual or 1
        self._whole = None
        own = attributes_of(iterator)
        self.sampler.begin(iterator, own, first)
        fetcher = own.get("_dataset_fetcher")
        if fetcher is not None:
            self._time(fetcher, counted=usual is None)
        elif workers == 0:
            self._whole = usual  # a loader of the user's own, that says that it has no workers
        self._ready = None if fetcher is not None else batch_is_ready(own, group)
        if self._ready is not None:
            self._cpu = thread_time_ns()

    def _time(self, fetcher: Any, counted: bool) -> None:
        kind = type(fetcher)
        timed = self._kinds.get(kind)
        if timed is None:
            if not can_subclass(kind) or original_class(kind) is not None:
                return
            timed = self._kinds[kind] = timed_fetcher(kind, self._items_begin, self._collate_begin, counted)
        set_class(fetcher, timed)
        self._fetcher = fetcher, kind

    def _items_begin(self) -> None:
        self._cpu = thread_time_ns()
        self._begun = monotonic_ns()

    def _collate_begin(self, counted: int) -> None:
        self._count = counted or self._count
        self._collating = monotonic_ns()

    def collated(self) -> None:
        """The batch is there, and pinned next."""
        self._collated = monotonic_ns()

    def end(self, wait: int, delivered: bool, first: bool) -> None:
        """It came after ``wait`` nanoseconds, or the loader ended; the ``first`` of an epoch is a case apart."""
        now = self._restore()
        self.sampler.end(delivered, first)
        if not delivered:
            return
        if self._collating:
            self.split = True
            collated = self._collated or now
            self.made.append((self._collating - self._begun, collated - self._collating, self._count))
            self.cpu.append(thread_time_ns() - self._cpu)
            if self._collated:
                self.pinning.append(now - collated)
        elif self._whole and not first:
            self.made.append((wait, 0, self._whole))
        elif self._ready is not None and not first:
            self.receive_cpu.append(max(0, thread_time_ns() - self._cpu - self.sampler.spent))
            self.ready.append(self._ready)
            if self._ready:
                self.transfer.append(wait)

    def _restore(self) -> int:
        now = monotonic_ns()
        if self._fetcher is not None:
            fetcher, kind = self._fetcher
            self._fetcher = None
            set_class(fetcher, kind)
        return now


def batch_is_ready(own: dict[str, Any], group: WorkerGroup | None) -> bool | None:
    """Whether a multi-process iterator has the next batch to give, from its attributes; None where it cannot tell.

    Batches come in order: another one that is in the queue does not count. The next one is the oldest task of its
    worker, and done when the worker has fewer tasks left, waiting and in work, than it was given.
    """
    tasks, at = own.get("_task_info"), own.get("_rcvd_idx")
    task = tasks.get(at) if isinstance(tasks, dict) else None
    if task is None or group is None or not task or not 0 <= task[0] < len(group.slots):
        return None
    if len(task) == 2:
        return True  # it came before its turn
    worker = task[0]
    given = [other for other in (tasks or {}).values() if len(other) == 1 and other[0] == worker]
    try:
        waiting = own["_index_queues"][worker].qsize()
    except expected(OSError, ValueError, NotImplementedError, LookupError):
        return None  # closed, or not to be told on this system
    in_work = 1 if group.slots[worker][Slot.BUSY_SINCE] else 0
    return bool(len(given) - waiting - in_work > 0)


def quantiles(times: list[int], wanted: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Seconds at these quantiles of nanoseconds, by nearest rank."""
    ordered = sorted(times)
    for quantile in wanted:
        yield quantile, ordered[min(len(ordered) - 1, int(float(quantile) * len(ordered)))] / 1e9


def median_seconds(times: list[int]) -> float:
    """Their median, in seconds."""
    return statistics.median(times) / 1e9
