"""What a rank spends on work of its own in a step: the wait for other ranks left out.

Ranks that reduce gradients take equally long for a step, for the fast ones wait for the slow one in their backward. So
a backward counts until its last gradient is ready, as DistributedDataParallel measures it, and a forward less the wait
for buffers that it begins with. Where nobody tells wait from work (``fully_shard``), the phase is left out.
"""

from __future__ import annotations

import statistics
from collections import deque

from gpuwatch.catalog import OWN_SECONDS, OWN_STEP_SECONDS
from gpuwatch.layout import Column, Tag
from gpuwatch.record import RecordWriter

FEWEST_STEPS = 20
RECENT_STEPS = 128
WARM_UP_STEPS = 10

_LEFT_OUT = int(Tag.EPOCH_START | Tag.EVALUATION | Tag.COMPILE | Tag.GC)
_PHASES = {
    "data": Column.DATA,
    "forward": Column.FORWARD,
    "backward": Column.BACKWARD,
    "optimizer": Column.OPTIMIZER,
}


class OwnWork:
    """The recent steps that were looked at, and what of them was the rank's own."""

    def __init__(self, record: RecordWriter) -> None:
        self.record = record
        self._last = 0.0
        self._steps: deque[dict[str, float]] = deque(maxlen=RECENT_STEPS)

    def step_end(self) -> None:
        """Take in the last step that was written, if it was looked at."""
        for row in self.record.recent_rows(1):
            fresh = row[Column.NUMBER] > max(self._last, WARM_UP_STEPS)
            if not fresh or int(row[Column.TAGS]) & _LEFT_OUT:
                continue
            spent = {phase: row[column] for phase, column in _PHASES.items() if row[column] == row[column]}
            if "forward" in spent and "backward" in spent:
                self._last = row[Column.NUMBER]
                spent["other"] = row[Column.TOTAL] - sum(spent.values())
                self._steps.append(spent)

    def publish(self, known: dict[str, float | None]) -> None:
        """Write the medians by phase. ``known`` are phases in which waits were told from work; None leaves one out."""
        if len(self._steps) < FEWEST_STEPS:
            return
        own: dict[str, float] = {}
        for phase in (*_PHASES, "other"):
            seconds = [spent[phase] for spent in self._steps if phase in spent]
            measured = known[phase] if phase in known else statistics.median(seconds) if seconds else None
            if measured is not None:
                own[phase] = max(0.0, measured)
        values = self.record.values
        for phase, median in own.items():
            values[self.record.series(OWN_SECONDS.name, phase=phase)] = median
        values[self.record.series(OWN_STEP_SECONDS.name)] = sum(own.values())

    def median(self, phase: str) -> float | None:
        """Median seconds of a phase, waits and all."""
        seconds = [spent[phase] for spent in self._steps if phase in spent]
        return statistics.median(seconds) if seconds else None
