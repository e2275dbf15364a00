"""What each worker of the training loader does, for the table in the report; published by nobody."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic_ns

from gpuwatch.layout import WORKER_ROW
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.worker_area import Slot, cpu_time
from gpuwatch_hooks.workers import LIVED_NANOSECONDS, WorkerGroup, Workers

MOST_WORKERS = 16
"""Workers that get a row; those beyond do the same work."""


class WorkerTable:
    """Writes a row for each worker of the iterator that is in use."""

    def __init__(self, record: RecordWriter) -> None:
        self.record = record
        self._born = 0
        self._starts = 0

    @guarded("loader")
    def publish(self, workers: Workers) -> None:
        """Write the rows, where there are workers. Those of workers that are gone stay as they were."""
        living = [group for group in workers.groups if group.living()]
        if not living:
            return
        group = max(living, key=lambda group: group.born)
        self._count(living)
        now = monotonic_ns()
        for worker, words in enumerate(group.slots[:MOST_WORKERS]):
            for part, number in (*row(words, now), ("starts", float(self._starts))):
                self.record.values[self.record.series(WORKER_ROW, worker=str(worker), part=part)] = number

    def _count(self, living: list[WorkerGroup]) -> None:
        fresh = [group.born for group in living if group.born > self._born]
        self._starts += len(fresh)
        self._born = max((self._born, *fresh))


def row(words: memoryview, now: int) -> Iterator[tuple[str, float]]:
    """A worker's numbers: counts, bytes, and shares of its time or of the time it makes batches; what is known."""
    started, since = words[Slot.STARTED], words[Slot.BUSY_SINCE]
    lived, made = now - started, words[Slot.ITEM_TIME] + words[Slot.COLLATE_TIME]
    if not started or lived < LIVED_NANOSECONDS:
        return
    yield "batches", float(words[Slot.BATCHES])
    yield "busy", min(1.0, (made + (max(0, now - since) if since else 0)) / lived)
    if words[Slot.CORE_WAIT]:
        yield "core_wait", min(1.0, words[Slot.CORE_WAIT] / lived)
    if made:
        running = min(1.0, cpu_time(words) / made)
        yield "cpu", running
        yield "blocked", max(0.0, 1 - running - words[Slot.CORE_WAIT] / made)
    for part, slot in (("resident", Slot.RESIDENT), ("unique", Slot.UNIQUE)):
        if words[slot]:
            yield part, float(words[slot])
