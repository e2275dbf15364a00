"""The copy of a batch to the device, from the events that the device's phases are timed by: how long, and waited for?

Between the batch's arrival and the forward a loop moves the batch. On the device's clock that span is the copy, with
the time it had nothing to do; it is taken for a copy only where it is no longer than one of that size can take. A copy
was waited for where the device was behind when the batch came, and had done everything when the forward began.

Written from torch's documented interface (``torch.cuda.Event``); not verified on a device.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from gpuwatch.catalog import LOADER_BATCH_BYTES, LOADER_PART_SECONDS
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.accelerator import Event
from gpuwatch_hooks.ledger import DATA, EPOCH_START, FORWARD, OTHER, PENDING

RULE = "data-h2d-blocking"

SLOWEST_BYTES_PER_SECOND = 1e9
"""A copy from pageable memory over a slow link; what takes longer is something else."""

OVERHEAD_SECONDS = 0.0005
KEPT = 32
FEWEST = 8

Marks = Sequence[tuple[int, Event]]


class TransferProbe:
    """The copies of the steps that are timed on the device."""

    def __init__(self, record: RecordWriter) -> None:
        self.record = record
        self.seconds: deque[float] = deque(maxlen=KEPT)
        self.waited: deque[bool] = deque(maxlen=KEPT)
        self._behind = False
        self._caught_up: dict[int, bool] = {}  # by the event at a batch's arrival
        self._said = False

    def marked(self, marks: Marks) -> None:
        """Another event was put into the stream, the last of these: did a batch come, does the forward begin?"""
        if arrived(marks, len(marks) - 1):
            self._behind = not marks[-1][1].query()
        elif self._behind and marks[-1][0] in (FORWARD, PENDING) and arrived(marks, len(marks) - 2):
            self._behind = False
            self._caught_up[id(marks[-2][1])] = marks[-1][1].query()

    def passed(self, marks: Marks) -> None:
        """The device has passed all events of a step."""
        for place in range(1, len(marks) - 1):
            if not arrived(marks, place) or marks[place + 1][0] not in (FORWARD, PENDING):
                continue
            begin, end = marks[place][1], marks[place + 1][1]
            seconds = begin.elapsed_time(end) / 1000
            copied = self._is_copy(seconds)
            if copied:
                self.seconds.append(seconds)
            caught_up = self._caught_up.pop(id(begin), None)
            if caught_up is not None and copied is not None:
                self.waited.append(caught_up and copied)
        self._caught_up.clear()

    def _is_copy(self, seconds: float) -> bool | None:
        """Whether a batch can take so long to copy; None where its size is not known."""
        size = self.record.values[self.record.series(LOADER_BATCH_BYTES.name)]
        if not size > 0:
            return None
        return seconds <= OVERHEAD_SECONDS + size / SLOWEST_BYTES_PER_SECOND

    def publish(self) -> None:
        """Write the time of a copy, and how often it was waited for."""
        if len(self.seconds) >= FEWEST:
            index = self.record.series(LOADER_PART_SECONDS.name, part="copy")
            self.record.values[index] = statistics.median(self.seconds)
        share = sum(self.waited) / len(self.waited) if len(self.waited) >= FEWEST else 0.0
        if share or self._said:
            self._said = True
            self.record.observe(RULE, "", f"of {len(self.waited)} steps that were timed on the device", share)


def arrived(marks: Marks, place: int) -> bool:
    """Whether the event at this place is that of a batch's arrival."""
    return place >= 1 and marks[place][0] == OTHER and marks[place - 1][0] in (DATA, EPOCH_START)
