"""Host memory that grows although the batches do not: the sign of a leak whose holder no name leads to.

Bytes in use (glibc's ``mallinfo2``) are read at the same point of looked-at steps. They are steady to a few kilobytes
in a healthy loop, unlike the resident set. A loop whose batches vary in size is not judged: oneDNN alone caches tens of
kilobytes for each new shape.
"""

from __future__ import annotations

import gc

from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.memory import bytes_in_use
from gpuwatch_hooks.trend import Trend

HOST_RULE = "leak-host"
CYCLIC_RULE = "leak-cyclic"

UNCOLLECTED = 2_000
"""Objects made since the last collection, with automatic collection off, from which garbage is suspected."""


class GrowthProbe:
    """Reads bytes in use and follows their trend."""

    def __init__(self, record: RecordWriter, clock: StepClock) -> None:
        self.record = record
        self.clock = clock
        self.trend = Trend()
        self.varied = False
        self.rule = ""

    def look(self, varying: bool) -> None:
        """A step ended during a look; ``varying`` when batches differ in size, or are not seen."""
        step = self.clock.steps
        self.varied = self.varied or varying
        if not self.trend.due(step):
            return
        used = bytes_in_use()
        if used is not None:
            self.trend.add(step, used)

    def per_step(self) -> float:
        """Growth in bytes a step, 0 unless every quarter of the window grew."""
        grown, steps = self.trend.growth()
        return grown / steps if steps and not self.varied else 0.0

    @guarded("growth")
    def publish(self) -> None:
        """Say how much it grows: garbage in cycles where automatic collection is off, else memory without a name."""
        growing = self.per_step()
        if not growing and not self.rule:
            return
        self.rule = self.rule or (CYCLIC_RULE if uncollected_garbage() else HOST_RULE)
        first, last = self.trend.readings[0], self.trend.readings[-1]
        evidence = f"{last[1] - first[1]:,.0f} bytes more in use at step {last[0]:,} than at step {first[0]:,}"
        self.record.observe(self.rule, "", evidence, growing)


def uncollected_garbage() -> bool:
    """Whether objects pile up because nothing collects cycles."""
    return not gc.isenabled() and gc.get_count()[0] > UNCOLLECTED
