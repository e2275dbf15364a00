"""Loader workers that copy the data set by reading it: what of it each of them holds as pages of its own by now.

The unique memory of a worker says little: a healthy one gains 40 to 65 MB while it warms up. Instead, of the objects
that a data set held before the fork (:mod:`gpuwatch_hooks.holdings`), the kernel is asked whether their pages are
still shared: ``/proc/PID/pagemap`` has a bit for a page that only one process maps (Documentation/admin-guide/mm/
pagemap.rst, bit 56). A forked worker has them at the same addresses.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpuwatch.catalog import WORKER_COPIED
from gpuwatch.interruption import expected
from gpuwatch.limits import COPIED_BYTES
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.holdings import MOST_ATTRIBUTES, Holding, attributes_of, holdings

RULE = "leak-host"

LEAST_BYTES = COPIED_BYTES // 8
"""Estimated bytes of a data set's objects below which its workers are not looked at: eight copies would not matter."""

MOST_ADDRESSES = 128
MOST_WORKERS = 4
"""Workers looked at; the others do the same work."""

SELDOM = 16
"""Ticks between looks at workers that copy no more."""

PAGE = os.sysconf("SC_PAGE_SIZE")
EXCLUSIVE, PRESENT = 1 << 56, 1 << 63


class Iterators(Protocol):
    """What is needed of a loader that is watched."""

    def living(self) -> Sequence[Any]:
        """Its iterators that still exist."""


@dataclass
class Copied:
    """One data set, what it holds, and how much of that was copied."""

    holding: Holding
    first_step: int
    sizes: tuple[int, ...]
    bytes: float = 0.0
    share: float = 0.0
    workers: int = 0
    per_step: float = 0.0
    still: int = 0  # looks in a row that found no more copied


class CopyProbe:
    """Follows the data sets whose loaders have workers."""

    def __init__(self, record: RecordWriter, clock: StepClock) -> None:
        self.record = record
        self.clock = clock
        self.known: dict[int, Copied] = {}  # by the data set's id; its iterators keep it alive
        self.turn = 0

    @guarded("copies")
    def survey(self, loader: object) -> None:
        """A loader is about to start its workers: what does its data set hold?"""
        dataset = getattr(loader, "dataset", None)
        if not getattr(loader, "num_workers", 0):
            return
        sizes = _lengths(dataset)
        before = self.known.get(id(dataset))
        if before is not None and before.sizes == sizes:
            return
        self.known.pop(id(dataset), None)
        found = holdings(dataset)
        if found and found[0].estimated_bytes >= LEAST_BYTES:
            self.known[id(dataset)] = Copied(found[0], self.clock.steps, sizes)

    @guarded("copies")
    def publish(self, loaders: Iterable[Iterators]) -> None:
        """Write how much was copied, and say it where that is much."""
        self.turn += 1
        for loader in loaders if self.known else ():
            for iterator in loader.living():
                copied = self.known.get(id(getattr(iterator, "_dataset", None)))
                if copied is not None and (copied.still < 2 or self.turn % SELDOM == 0):
                    self._look(copied, forked(getattr(iterator, "_workers", ())))
        for copied in self.known.values():
            if copied.bytes >= COPIED_BYTES:
                self._say(copied)
        total = sum(copied.bytes for copied in self.known.values())
        if total:
            self.record.values[self.record.series(WORKER_COPIED.name)] = total

    def _look(self, copied: Copied, workers: Sequence[int]) -> None:
        shares = [
            share
            for pid in workers[:MOST_WORKERS]
            if (share := own_pages(pid, copied.holding.addresses[:MOST_ADDRESSES])) is not None
        ]
        if not shares:
            return
        share = sum(shares) / len(shares)
        now = share * copied.holding.estimated_bytes * len(workers)
        copied.still = 0 if now > 1.01 * copied.bytes else copied.still + 1
        if now > copied.bytes:
            copied.bytes, copied.share, copied.workers = now, share, len(workers)
            steps = max(1, self.clock.steps - copied.first_step)
            # The rate at which it once grew: later it levels off, and the copies stay.
            copied.per_step = max(copied.per_step, now / steps) if now >= COPIED_BYTES else now / steps

    def _say(self, copied: Copied) -> None:
        holding = copied.holding
        evidence = (
            f"{copied.workers} loader workers hold copies of about {copied.bytes / copied.workers / 2**20:,.0f} MiB "
            f"each: {holding.objects:,} Python objects, of which they have copied {copied.share:.0%} by reading them"
        )
        self.record.observe(RULE, holding.name, evidence, copied.per_step)


def _lengths(dataset: object) -> tuple[int, ...]:
    """A data set's collections in short: as long as these stay, its objects are taken to be the same."""
    parts: list[Any] = [dataset, *list(attributes_of(dataset).values())[:MOST_ATTRIBUTES]]
    return tuple(number for part in parts if type(part) in (list, tuple, dict) for number in (id(part), len(part)))


def forked(workers: Sequence[Any]) -> list[int]:
    """Process ids of the workers that were forked: only they share pages with this process."""
    method = multiprocessing.get_start_method(allow_none=True)
    return [
        worker.pid
        for worker in workers
        if (getattr(worker, "_start_method", None) or method) == "fork" and worker.pid is not None
    ]


def own_pages(pid: int, addresses: Iterable[int]) -> float | None:
    """Share of the pages of these addresses that no other process maps; None where the kernel does not tell."""
    own = known = 0
    try:
        descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    except expected(OSError):
        return None
    try:
        for address in addresses:
            entry = int.from_bytes(os.pread(descriptor, 8, address // PAGE * 8), "little")
            if entry & PRESENT:
                known += 1
                own += bool(entry & EXCLUSIVE)
    except expected(OSError):
        return None
    finally:
        os.close(descriptor)
    return own / known if known else None
