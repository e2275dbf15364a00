"""Loader workers, as the training process sees them: what they stored in their area, read at ticks.

Sums run over all iterators of a loader (workers that are started anew at each epoch are as good as those that stay);
shares are taken over the last half minute of them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from time import monotonic_ns
from typing import Any

from gpuwatch.catalog import (
    WORKER_BLOCKED,
    WORKER_BUSY,
    WORKER_CPU,
    WORKER_CPU_WAIT,
    WORKER_RESIDENT,
    WORKER_UNIQUE,
)
from gpuwatch_hooks.stolen import StolenTime
from gpuwatch_hooks.worker_area import ENTRY, RING_AT, Slot, WorkerArea, cpu_time

WINDOW = 30
"""Ticks over which shares of the workers' time are taken."""

KEPT_BATCHES = 256
LIVED_NANOSECONDS = 100_000_000
"""Time since the workers' start below which a share of it says nothing."""

Made = tuple[int, int, int]
"""A batch: nanoseconds of its items, of its collation, number of items."""


@dataclass(frozen=True)
class Sums:
    """Sums over workers; times in nanoseconds."""

    batches: int = 0
    made: int = 0  # time of whole batches
    busy: int = 0  # the batch in work included
    cpu: int = 0
    core_wait: int = 0
    lived: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def since(self, earlier: Sums) -> Sums:
        """What came to them."""
        return Sums(*(max(0, getattr(self, field.name) - getattr(earlier, field.name)) for field in fields(self)))


class WorkerGroup:
    """The workers of one iterator. They may be gone: what they stored is still there."""

    def __init__(self, iterator: object, area: WorkerArea) -> None:
        self.iterator = weakref.ref(iterator)
        self.area = area
        self.slots = [area.slot(worker) for worker in range(area.workers)]
        self.born = self.fetched = monotonic_ns()  # when a batch was last asked for, in a look

    def living(self) -> bool:
        """Whether the iterator is there and has not ended its workers."""
        iterator: Any = self.iterator()
        return iterator is not None and not getattr(iterator, "_shutdown", True)

    def sums(self, now: int) -> Sums:
        """Over all its workers."""
        total = Sums()
        living = self.living()
        for words in self.slots:
            started, since = words[Slot.STARTED], words[Slot.BUSY_SINCE]
            if not started:
                continue  # it is starting
            made = words[Slot.ITEM_TIME] + words[Slot.COLLATE_TIME]
            until = now if living else words[Slot.LAST_END] or started
            total += Sums(
                words[Slot.BATCHES],
                made,
                made + (max(0, now - since) if since and living else 0),
                cpu_time(words),
                words[Slot.CORE_WAIT],
                max(0, until - started),
            )
        return total

    def recent(self) -> Iterator[Made]:
        """The last batches of each worker, oldest first."""
        for words in self.slots:
            count = words[Slot.BATCHES]
            ring = words[RING_AT:].tolist()
            known = min(count, len(ring) // ENTRY)
            for number in range(count - known, count):
                at = number * ENTRY % len(ring)
                yield ring[at], ring[at + 1], ring[at + 2]

    def largest(self, word: Slot) -> int:
        """The largest of the workers' numbers; 0 where none is known."""
        return max((slot[word] for slot in self.slots), default=0)


class Workers:
    """All workers of a loader, one iterator after the other."""

    def __init__(self) -> None:
        self.groups: list[WorkerGroup] = []
        self._earlier = Sums()
        self._made: deque[Made] = deque(maxlen=KEPT_BATCHES)
        self._ticks: deque[Sums] = deque([Sums()], maxlen=WINDOW)
        self._memory: dict[Slot, int] = {}
        self._gone: dict[int, int] = {}  # the last workers that ended, by process
        self._stolen = StolenTime()

    def add(self, group: WorkerGroup) -> None:
        """Another iterator starts its workers."""
        self.retire()
        self.groups.append(group)

    def take(self, other: Workers) -> None:
        """Go on with the workers of a loader that came before."""
        self.groups = other.groups + self.groups
        self._earlier += other._earlier
        self._made = deque([*other._made, *self._made], maxlen=KEPT_BATCHES)
        self._memory = {**other._memory, **self._memory}
        other.groups = []

    def group_of(self, iterator: object) -> WorkerGroup | None:
        """The workers of this iterator."""
        return next((group for group in self.groups if group.iterator() is iterator), None)

    def asked(self, iterator: object) -> WorkerGroup | None:
        """A batch is asked for, during a look; returns the workers that make it."""
        group = self.group_of(iterator)
        if group is not None:
            group.fetched = monotonic_ns()
            group.area.close_descriptor()
        return group

    def processes(self) -> dict[int, int]:
        """The numbers of the workers of the last iterators, by process."""
        known = {slot[Slot.PID]: number for group in self.groups for number, slot in enumerate(group.slots)}
        return {**self._gone, **known}

    def retire(self) -> None:
        """Keep the sums of workers that are gone, and let go of their area."""
        for group in [group for group in self.groups if not group.living()]:
            self.groups.remove(group)
            self._gone = {slot[Slot.PID]: number for number, slot in enumerate(group.slots)}
            self._earlier += group.sums(0)
            self._made.extend(group.recent())
            self._note_memory(group)

    def _note_memory(self, group: WorkerGroup) -> None:
        for word in (Slot.RESIDENT, Slot.UNIQUE):
            size = group.largest(word)
            if size:
                self._memory[word] = size

    def made(self) -> list[Made]:
        """The last batches made."""
        now = [batch for group in self.groups for batch in group.recent()]
        return now if len(now) >= KEPT_BATCHES // 4 else [*self._made, *now][-KEPT_BATCHES:]

    def tick(self) -> Sums:
        """What the workers did in the window that ends now."""
        now = monotonic_ns()
        total = self._earlier
        for group in self.groups:
            total += group.sums(now)
        if total.cpu:
            total += Sums(core_wait=self._stolen.note(total.cpu))
        recent = total.since(self._ticks[0])
        self._ticks.append(total)
        return recent

    def readings(self, recent: Sums) -> Iterator[tuple[str, float]]:
        """The gauges of what they did recently; none of what is not known."""
        for group in self.groups:
            self._note_memory(group)
        for metric, word in ((WORKER_RESIDENT, Slot.RESIDENT), (WORKER_UNIQUE, Slot.UNIQUE)):
            if word in self._memory:
                yield metric.name, self._memory[word]
        if recent.lived > LIVED_NANOSECONDS:
            yield WORKER_BUSY.name, min(1.0, recent.busy / recent.lived)
            if recent.core_wait:
                # Of all their time: one that sleeps for most of it (a disk, a network) waits for a core at each
                # awakening, and still is not slowed down by that.
                yield WORKER_CPU_WAIT.name, min(1.0, recent.core_wait / recent.lived)
        if recent.made:
            running = min(1.0, recent.cpu / recent.made)
            yield WORKER_CPU.name, running
            yield WORKER_BLOCKED.name, max(0.0, 1 - running - recent.core_wait / recent.made)
