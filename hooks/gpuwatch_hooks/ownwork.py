"""What a rank spends on work of its own in a step: the wait for other ranks left out.

Ranks that reduce gradients take equally long for a step, for the fast ones wait for the slow one in their backward. So
a backward counts until its last gradient is ready, as DistributedDataParallel measures it, and a forward less the wait
for buffers that it begins with. Where nobody tells wait from work (``fully_shard``), the phase is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from gpuwatch.catalog import OWN_SECONDS, OWN_STEP_SECONDS
from gpuwatch.record import RecordWriter

FEWEST_STEPS = 20
PHASES = ("data", "forward", "backward", "optimizer", "other")


class OwnWork:
    """What of the recent steps that were looked at (``steps``, seconds by phase) was the rank's own."""

    def __init__(self, record: RecordWriter, steps: Sequence[Mapping[str, float]]) -> None:
        self.record = record
        self._steps = steps

    def publish(self, known: dict[str, float | None]) -> None:
        """Write what is usual by phase. ``known``: phases in which waits were told from work; None leaves one out."""
        if len(self._steps) < FEWEST_STEPS:
            return
        own: dict[str, float] = {}
        for phase in PHASES:
            seconds = [spent[phase] for spent in self._steps if phase in spent]
            measured = known[phase] if phase in known else usual(seconds) if seconds else None
            if measured is not None:
                own[phase] = max(0.0, measured)
        values = self.record.values
        for phase, measured in own.items():
            values[self.record.series(OWN_SECONDS.name, phase=phase)] = measured
        values[self.record.series(OWN_STEP_SECONDS.name)] = sum(own.values())

    def usual(self, phase: str) -> float | None:
        """Usual seconds of a phase, waits and all."""
        seconds = [spent[phase] for spent in self._steps if phase in spent]
        return usual(seconds) if seconds else None


def usual(seconds: Sequence[float]) -> float:
    """The mean of the middle half.

    Of ranks that are slow by turns, each in every other step, a median is that of the slow steps or of the quick ones,
    as it happens; a mean of all would be that of one checkpoint.
    """
    ordered = sorted(seconds)
    aside = len(ordered) // 4
    return statistics.fmean(ordered[aside : len(ordered) - aside])
