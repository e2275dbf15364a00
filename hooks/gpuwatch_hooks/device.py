"""The device's own clock and its allocator's counters, on runs that use an accelerator.

On sampled steps an event goes into the stream at each change of phase. They are polled, oldest step first, and never
waited for; a step whose events are complete adds its spans to the device's phase counters. Allocator counters are read
at most ten times a second.
"""

from __future__ import annotations

import itertools
from collections import deque
from time import monotonic_ns

from gpuwatch.catalog import DEVICE_DONE_EARLY, DEVICE_PHASE_SECONDS
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.accelerator import Accelerator, CudaAccelerator, Event
from gpuwatch_hooks.allocator import AllocatorProbe
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.ledger import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PENDING
from gpuwatch_hooks.transfer import TransferProbe

COUNTERS_NANOSECONDS = 100_000_000
STEPS_IN_FLIGHT = 16
"""Sampled steps whose events may be outstanding; beyond that the newest are not timed."""

STEPS_COUNTED = 32
"""Looked-at steps of which is told how many the device had done when they ended."""

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
        self.allocator = AllocatorProbe(record, clock, self.accelerator)
        self.transfer = TransferProbe(record)
        self.active = False
        self.done_early: deque[bool] = deque(maxlen=STEPS_COUNTED)
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
        if phase == BACKWARD and self.clock.sampled:
            read_at_backward(self)

    def after_step(self, now: int) -> None:
        """A step ended: put its events in line, poll the older ones, read the counters when it is time."""
        if not self.active:
            return
        if self.marks:
            ask_whether_done(self)
            self.waiting.append(self.marks)
            self.marks = []
            self._on_phase(self.clock.phase)  # the phase that goes on belongs to the next step
        poll(self)
        if now >= self._next_counters:
            self._next_counters = now + COUNTERS_NANOSECONDS
            read_counters(self)

    def step_end(self, varying: bool) -> None:
        """During a look an optimizer has stepped; ``varying`` when batches differ in size, or are not seen."""
        if self.active:
            read_at_step_end(self, varying)

    @guarded("device")
    def publish(self) -> None:
        """Write the device's seconds by phase."""
        self.look()
        for name, seconds in self.seconds.items():
            self.record.values[self.record.series(DEVICE_PHASE_SECONDS.name, phase=name)] = seconds
        if len(self.done_early) == STEPS_COUNTED:
            share = sum(self.done_early) / STEPS_COUNTED
            self.record.values[self.record.series(DEVICE_DONE_EARLY.name)] = share
        publish_copies(self)

    def stop(self) -> None:
        """No more events; the counters a last time."""
        if self.active:
            read_counters(self)
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
    follow_batch(probe)


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
        time_copies(probe, marks)
        probe.spare.extend(event for _, event in marks)


@guarded("transfer")
def follow_batch(probe: DeviceProbe) -> None:
    """The last event may be that of a batch's arrival, or of the forward on it."""
    probe.transfer.marked(probe.marks)


@guarded("transfer")
def time_copies(probe: DeviceProbe, marks: Marks) -> None:
    """The device has passed these events: how long did it copy?"""
    probe.transfer.passed(marks)


@guarded("transfer")
def publish_copies(probe: DeviceProbe) -> None:
    """Write what is known of the copies."""
    probe.transfer.publish()


@guarded("device")
def ask_whether_done(probe: DeviceProbe) -> None:
    """Has the device already done what the step asked of it? Then the program is what limits the speed."""
    probe.done_early.append(probe.marks[-1][1].query())


@guarded("allocator")
def read_counters(probe: DeviceProbe) -> None:
    """Copy the allocator's counters into the record."""
    probe.allocator.read(monotonic_ns())


@guarded("allocator")
def read_at_backward(probe: DeviceProbe) -> None:
    """A backward starts."""
    if probe.accelerator.ready():
        probe.allocator.backward_begin(monotonic_ns())


@guarded("allocator")
def read_at_step_end(probe: DeviceProbe, varying: bool) -> None:
    """An optimizer has stepped."""
    if probe.accelerator.ready():
        probe.allocator.step_end(varying, monotonic_ns())
