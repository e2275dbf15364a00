"""Host memory that grows although the batches do not: the sign of a leak whose holder no name leads to.

Bytes in use (glibc's ``mallinfo2``) are read at the same point of looked-at steps. They are steady to a few kilobytes
in a healthy loop, unlike the resident set. A loop whose batches vary in size is not judged: oneDNN alone caches tens of
kilobytes for each new shape.
"""

from __future__ import annotations

import gc

from gpuwatch.limits import HOST_GROWTH_BYTES
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.in_use import InUse
from gpuwatch_hooks.trend import Trend

HOST_RULE = "leak-host"
CYCLIC_RULE = "leak-cyclic"

UNCOLLECTED = 2_000
"""Objects made since the last collection, with automatic collection off, from which garbage is suspected."""

RISES = 3
"""Readings over which memory grew, the last of them included, from which looks come sooner."""

HURRIED_LOOKS = 24
ANSWER_STEPS = 64
"""Steps for which the answer of a search holds."""

EXPLAINED_SHARE = 0.5
"""Share of the growth that names must account for, so that it is theirs."""


NAMED_SHARE = 0.25
"""Share of the growth from which a container of texts or numbers is told of as its cause."""


class GrowthProbe:
    """Reads bytes in use and follows their trend."""

    def __init__(self, record: RecordWriter, clock: StepClock) -> None:
        self.record = record
        self.clock = clock
        self._in_use = InUse()
        self.trend = Trend()
        self.varied = False
        self.rule = ""
        self.asking = False  # memory grows, and nobody has looked yet whether a variable fills up
        self.hint = ""  # code that may be the cause, where no name leads to it
        self.holder = ("", 0.0)  # texts or numbers that pile up: what is said of them, and bytes a step
        self.rising = False  # the last few readings rose
        self._explained = 0.0
        self._explained_at = 0
        self._answered = 0  # the step of the last search
        self._hurried = 0

    def look(self, varying: bool) -> None:
        """A step ended during a look; ``varying`` when batches differ in size, or are not seen."""
        step = self.clock.steps
        self.varied = self.varied or varying
        if not self.trend.due(step):
            return
        used = self._in_use.read()
        if used is not None:
            self.trend.add(step, used)
            growing = self.per_step()
            fresh = self._answered > 0 and step <= self._answered + ANSWER_STEPS
            self.asking = not self.rule and growing >= HOST_GROWTH_BYTES and not fresh
            self.rising = self._rising()

    def explain(self, per_step: float) -> None:
        """A search found names that fill up by this many bytes a step and may stop at a limit, or grow and are said."""
        step = self.clock.steps
        # As long as the window of readings reaches back to an explained growth, it is that which it shows.
        if per_step >= self._explained or not self._recent():
            self._explained, self._explained_at = per_step, step
        self.asking = False
        self._answered = step

    def spread(self, size: float) -> float:
        """Bytes a step that so many may have added to the growth of the window."""
        readings = self.trend.readings
        return size / max(1, readings[-1][0] - readings[0][0]) if readings else 0.0

    def suspicious(self) -> bool:
        """Whether memory grew at the last few readings, and more looks would tell sooner."""
        if not self.rising or self._hurried >= HURRIED_LOOKS + self.clock.steps // 128:
            return False
        self._hurried += 1
        return True

    def _recent(self) -> bool:
        return bool(self.trend.readings) and self._explained_at >= self.trend.readings[0][0]

    def _rising(self) -> bool:
        last = list(self.trend.readings)[-RISES:]
        if self.varied or len(last) < RISES:
            return False
        steps = last[-1][0] - last[0][0]
        return last[-1][1] > last[-2][1] and last[-1][1] - last[0][1] >= HOST_GROWTH_BYTES * steps

    def per_step(self) -> float:
        """Growth in bytes a step, 0 unless every quarter of a recent window grew."""
        grown, steps = self.trend.growth()
        return grown / steps if steps and not (self.varied or self._stale()) else 0.0

    def _stale(self) -> bool:
        """Whether the last reading is longer ago than the window is long: they may cost too much to go on."""
        first, last = self.trend.readings[0][0], self.trend.readings[-1][0]
        return self.clock.steps - last > last - first

    @guarded("growth")
    def publish(self) -> None:
        """Say how much it grows: garbage in cycles where automatic collection is off, else memory without a name."""
        growing = self.per_step()
        if self.asking or self._explained >= EXPLAINED_SHARE * growing:
            growing = 0.0
        held, per_step = self.holder
        growing = max(growing, per_step)
        if growing < HOST_GROWTH_BYTES and not self.rule:
            return
        self.rule = self.rule or (CYCLIC_RULE if uncollected_garbage() else HOST_RULE)
        named = held if per_step >= NAMED_SHARE * growing else self.hint
        # Small objects lie in Python's own arenas, which are not measured: what holds them may weigh more.
        measured = self._measured() if self.per_step() >= EXPLAINED_SHARE * growing else ""
        self.record.observe(self.rule, "", "; ".join(part for part in (measured, named) if part), growing)

    def _measured(self) -> str:
        if not self.trend.readings:
            return ""
        first, last = self.trend.readings[0], self.trend.readings[-1]
        return f"{last[1] - first[1]:,.0f} bytes more in use at step {last[0]:,} than at step {first[0]:,}"


def uncollected_garbage() -> bool:
    """Whether objects pile up because nothing collects cycles."""
    return not gc.isenabled() and gc.get_count()[0] > UNCOLLECTED
