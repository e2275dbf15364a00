"""A scripted accelerator: a device that says what a test tells it to, where a real one is not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpuwatch.advisor import Finding, advise
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.accelerator import AllocatorCounters, Event
from gpuwatch_hooks.allocator import AllocatorProbe
from gpuwatch_hooks.clock import StepClock

GIB = 1 << 30
MIB = 1 << 20


class ScriptedEvent:
    """A point on a device's clock that has always been passed."""

    done = True

    def record(self) -> None:
        """Nothing to do."""

    def query(self) -> bool:
        """Whether it was passed."""
        return self.done

    def elapsed_time(self, end: Event, /) -> float:
        """Milliseconds."""
        return 1.0


class ScriptedAccelerator:
    """A healthy device of 80 GiB; tests change ``now`` and the rest as the run goes on."""

    def __init__(self) -> None:
        self.now = AllocatorCounters(
            allocated_bytes=20 * GIB,
            allocated_peak_bytes=40 * GIB,
            active_bytes=20 * GIB,
            active_peak_bytes=40 * GIB,
            reserved_bytes=48 * GIB,
            requested_bytes=20 * GIB - 8 * MIB,
            inactive_split_bytes=2 * GIB,
            private_pool_bytes=0,
            capacity_bytes=80 * GIB,
            segments=300,
            alloc_retries=0,
            ooms=0,
            device_allocs=400,
            device_frees=100,
            stream_syncs=0,
        )
        self.used: int | None = 49 * GIB
        self.fraction: float | None = 1.0
        self.pinned: int | None = 64 * MIB
        self.state: dict[str, object] | None = {"segments": [], "allocator_settings": {"expandable_segments": False}}
        self.snapshots = 0

    def ready(self) -> bool:
        """It is in use."""
        return True

    def event(self) -> Event:
        """A new one."""
        return ScriptedEvent()

    def counters(self) -> AllocatorCounters:
        """As scripted."""
        return self.now

    def change(self, **numbers: int | None) -> None:
        """Other numbers from now on."""
        self.now = replace(self.now, **numbers)

    def used_bytes(self) -> int | None:
        """As scripted."""
        return self.used

    def memory_fraction(self) -> float | None:
        """As scripted."""
        return self.fraction

    def dump_history(self, path: str) -> None:
        """No history is recorded here."""

    def pinned_bytes(self) -> int | None:
        """As scripted."""
        return self.pinned

    def snapshot(self) -> Mapping[str, object] | None:
        """As scripted, and counted."""
        self.snapshots += 1
        return self.state


class Bench:
    """An allocator probe on a scripted device: steps go by as a test says, and the advisor is asked at the end."""

    def __init__(self, directory: Path) -> None:
        self.device = ScriptedAccelerator()
        self.record = RecordWriter(directory, {"run": "scripted", "rank": 0})
        self.clock = StepClock(self.record, lambda now: None)
        self.probe = AllocatorProbe(self.record, self.clock, self.device)
        self.now = 1_000_000_000

    def steps(self, count: int, backward_bytes: int | None = None, **growth: int) -> None:
        """So many steps of a second each; counters in ``growth`` rise by that much at each step."""
        for _ in range(count):
            self.clock.steps += 1
            self.now += 1_000_000_000
            at_rest = self.device.now.active_bytes
            if backward_bytes is not None:
                self.device.change(active_bytes=backward_bytes)
            self.probe.backward_begin(self.now)
            self.device.change(active_bytes=at_rest)
            self.device.change(**{name: getattr(self.device.now, name) + more for name, more in growth.items()})
            self.probe.step_end(varying=False, now=self.now)
            self.probe.read(self.now)

    def value(self, name: str) -> float | None:
        """A series of the record."""
        return self.record.snapshot().values.get(name)

    def findings(self) -> list[Finding]:
        """What the advisor says of it."""
        return advise(self.record.snapshot())

    def rules(self) -> set[str]:
        """The rules it fires."""
        return {finding.rule for finding in self.findings()}
