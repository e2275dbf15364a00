"""The device's own clock and its allocator's counters, on runs that use an accelerator.

On sampled steps an event goes into the stream at each change of phase. They are polled, oldest step first, and never
waited for; a step whose events are complete adds its spans to the device's phase counters. Allocator counters are read
at most ten times a second.
"""

from __future__ import annotations

import itertools
from collections import deque

from gpuwatch.catalog import (
    ALLOC_RETRIES,
    DEVICE_ACTIVE_PEAK,
    DEVICE_ALLOCATED,
    DEVICE_CAPACITY,
    DEVICE_PHASE_SECONDS,
    DEVICE_RESERVED,
    OOMS,
)
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.accelerator import Accelerator, CudaAccelerator, Event
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.ledger import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PENDING

COUNTERS_NANOSECONDS = 100_000_000
STEPS_IN_FLIGHT = 16
"""Sampled steps whose events may be outstanding; beyond that the newest are not timed."""

MARKS_PER_STEP = 64
"""Changes of phase timed in one step; accumulation over many batches is cut off there."""

_NAMES = {OTHER: "other", DATA: "data", FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}

Marks = list[tuple[int, Event]]


class DeviceProbe:
    """Times phases by the device, and reads its allocator."""

    def __init__(self, record: RecordWriter, clock: StepClock, accelerator: Accelerator | None = None) -> None:
        self.record = record
        self.clock = clock
        self.accelerator: Accelerator = accelerator or CudaAccelerator()
        self.active = False
        self.marks: Marks = []
        self.waiting: deque[Marks] = deque()
        self.spare: list[Event] = []
        self.seconds: dict[str, float] = {}
        self._next_counters = 0

    def look(self) -> None:
        """Is there a device in use by now? Then phases are timed from the next sampled step on."""
        self.active = self.accelerator.ready()
        self.clock.on_phase = self._on_phase if self.active else None

    def _on_phase(self, phase: int) -> None:
        if self.clock.sampled and len(self.waiting) < STEPS_IN_FLIGHT:
            mark(self, phase)

    def after_step(self, now: int) -> None:
        """A step ended: put its events in line, poll the older ones, read the counters when it is time."""
        if not self.active:
            return
        if self.marks:
            self.waiting.append(self.marks)
            self.marks = []
            self._on_phase(self.clock.phase)  # the phase that goes on belongs to the next step
        poll(self)
        if now >= self._next_counters:
            self._next_counters = now + COUNTERS_NANOSECONDS
            read_counters(self)

    @guarded("device")
    def publish(self) -> None:
        """Write the device's seconds by phase."""
        self.look()
        for name, seconds in self.seconds.items():
            self.record.values[self.record.series(DEVICE_PHASE_SECONDS.name, phase=name)] = seconds

    def stop(self) -> None:
        """No more events."""
        self.clock.on_phase = None
        self.active = False


@guarded("device")
def mark(probe: DeviceProbe, phase: int) -> None:
    """Note on the device's clock that a phase begins."""
    if len(probe.marks) >= MARKS_PER_STEP or not probe.accelerator.ready():
        return
    event = probe.spare.pop() if probe.spare else probe.accelerator.event()
    event.record()
    probe.marks.append((phase, event))


@guarded("device")
def poll(probe: DeviceProbe) -> None:
    """Take in the steps the device has finished."""
    while probe.waiting and probe.waiting[0][-1][1].query():
        marks = probe.waiting.popleft()
        trained = any(phase == BACKWARD for phase, _ in marks)
        for (phase, begin), (_, end) in itertools.pairwise(marks):
            # A forward in eval mode with gradients was training when a backward came after it.
            name = _NAMES.get(FORWARD if phase == PENDING and trained else phase)
            if name is not None:
                probe.seconds[name] = probe.seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
        probe.spare.extend(event for _, event in marks)


@guarded("device")
def read_counters(probe: DeviceProbe) -> None:
    """Copy the allocator's counters into the record."""
    counters = probe.accelerator.counters()
    for metric, number in (
        (DEVICE_ALLOCATED, counters.allocated_bytes),
        (DEVICE_ACTIVE_PEAK, counters.active_peak_bytes),
        (DEVICE_RESERVED, counters.reserved_bytes),
        (DEVICE_CAPACITY, counters.capacity_bytes),
        (ALLOC_RETRIES, counters.alloc_retries),
        (OOMS, counters.ooms),
    ):
        if number is not None:
            probe.record.values[probe.record.series(metric.name)] = number
