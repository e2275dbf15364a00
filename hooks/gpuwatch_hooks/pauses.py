"""Full garbage collections: how many, how long, and from which line they start."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from time import monotonic_ns

from gpuwatch.catalog import GC_ENABLED, GC_LONGEST, GC_PAUSE_SECONDS, GC_PAUSES
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.collector import listener
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.pace import PAUSE, Pace
from gpuwatch_hooks.place import user_place

RULE = "comp-gc-pause"
MOST_PLACES = 64
OLDEST_GENERATION = 2


class PauseProbe:
    """Listens to the collector."""

    def __init__(self, record: RecordWriter, clock: StepClock, pace: Pace) -> None:
        self.record = record
        self.clock = clock
        self.pace = pace
        self.count = 0
        self.nanoseconds = 0
        self.longest = 0
        self.places: Counter[str] = Counter()
        self._began = 0
        self._index = {metric.name: record.counter(metric.name) for metric in (GC_PAUSES, GC_PAUSE_SECONDS)}

        def listen(phase: str, details: dict[str, int]) -> None:
            if details["generation"] == OLDEST_GENERATION:
                collection(self, phase)

        # One of this instance, so that two runs in a process do not take out each other's.
        self._listen = listener(listen)
        gc.callbacks.append(self._listen)

    def stop(self) -> None:
        """Listen no more."""
        if self._listen in gc.callbacks:
            gc.callbacks.remove(self._listen)

    @guarded("gc")
    def publish(self) -> None:
        """Write the totals, and the line most collections start from."""
        values = self.record.values
        values[self._index[GC_PAUSES.name]] = self.count
        values[self.record.series(GC_ENABLED.name)] = gc.isenabled()
        values[self._index[GC_PAUSE_SECONDS.name]] = self.nanoseconds / 1e9
        if self.count:
            values[self.record.series(GC_LONGEST.name)] = self.longest / 1e9
            place, times = self.places.most_common(1)[0]
            if times >= 5 and times * 2 > self.count:
                self.record.observe(RULE, place, f"{times} of {self.count} began at this line", times)


@guarded("gc")
def collection(probe: PauseProbe, phase: str) -> None:
    """A full collection starts or stops."""
    if phase == "start":
        probe._began = monotonic_ns()
        return
    if not probe._began:
        return
    pause = monotonic_ns() - probe._began
    probe._began = 0
    probe.count += 1
    probe.nanoseconds += pause
    if probe.pace.looking:
        probe.clock.gc_nanoseconds += pause
    else:
        probe.pace.note(PAUSE)
        probe.pace.note(pause)
    probe.longest = max(probe.longest, pause)
    place = user_place(sys._getframe(2))
    if place in probe.places or len(probe.places) < MOST_PLACES:
        probe.places[place] += 1
