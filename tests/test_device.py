"""The device's clock and its allocator's counters, on a scripted device; and on a real one where there is one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.catalog import (
    ALLOC_RETRIES,
    DEVICE_ACTIVE_PEAK,
    DEVICE_ALLOCATED,
    DEVICE_CAPACITY,
    DEVICE_PHASE_SECONDS,
    DEVICE_RESERVED,
    OOMS,
)
from gpuwatch.expr import series_key
from gpuwatch.record import RecordWriter
from gpuwatch_hooks import attach as attaching
from gpuwatch_hooks import clock as clocks
from gpuwatch_hooks import device as devices
from gpuwatch_hooks import guard
from gpuwatch_hooks.accelerator import AllocatorCounters, CudaAccelerator, Event
from gpuwatch_hooks.clock import TRAIN, StepClock
from gpuwatch_hooks.device import COUNTERS_NANOSECONDS, MARKS_PER_STEP, STEPS_IN_FLIGHT, DeviceProbe

MILLISECOND = 1_000_000
WAIT, FORWARD, BACKWARD, STEP, OTHER = (part * MILLISECOND for part in (2, 3, 5, 1, 4))


def counters_of(**known: int | None) -> AllocatorCounters:
    """Counters of which only these are known."""
    return AllocatorCounters(**{counter.name: known.get(counter.name) for counter in fields(AllocatorCounters)})


@dataclass
class FakeEvent:
    """A point on the scripted device's clock. To wait for it is a failure."""

    device: FakeDevice
    at: int | None = None

    def record(self) -> None:
        self.at = self.device.now
        self.device.recorded += 1

    def query(self) -> bool:
        assert self.at is not None
        return self.at <= self.device.finished

    def elapsed_time(self, end: Event, /) -> float:
        assert isinstance(end, FakeEvent) and self.at is not None and end.at is not None
        assert self.query() and end.query(), "asked before the device has passed it"
        return (end.at - self.at) / MILLISECOND

    def synchronize(self) -> None:
        pytest.fail("a hook waited for the device")


@dataclass
class FakeDevice:
    """A device whose work finishes when the test says so."""

    now: int = 1_000_000_000
    finished: int = 0
    initialized: bool = True
    capturing: bool = False
    events: list[FakeEvent] = field(default_factory=list)
    recorded: int = 0
    counted: int = 0
    numbers: AllocatorCounters = field(default_factory=lambda: counters_of(allocated_bytes=10))

    def ready(self) -> bool:
        return self.initialized and not self.capturing

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]

    def counters(self) -> AllocatorCounters:
        self.counted += 1
        return self.numbers

    def used_bytes(self) -> int | None:
        return None

    def memory_fraction(self) -> float | None:
        return None

    def dump_history(self, path: str) -> None:
        """No history is recorded here."""

    def pinned_bytes(self) -> int | None:
        return None

    def snapshot(self) -> Mapping[str, object] | None:
        return None


@dataclass
class Rig:
    """A step clock and a probe on one scripted time."""

    device: FakeDevice
    record: RecordWriter
    clock: StepClock
    probe: DeviceProbe

    def spend(self, nanoseconds: int) -> None:
        """Time passes, on the host and in the device's queue."""
        self.device.now += nanoseconds

    def step(self, evaluate: bool = False) -> None:
        """One step of a loop with a loader."""
        self.clock.fetch_begin(False)
        self.spend(WAIT)
        self.clock.fetch_end(True, 4.0)
        if evaluate:
            self.clock.forward_begin(clocks.EVAL)
            self.spend(50 * MILLISECOND)
            self.clock.forward_end()
        self.clock.forward_begin(TRAIN)
        self.spend(FORWARD)
        self.clock.forward_end()
        self.clock.backward_begin()
        self.spend(BACKWARD)
        self.clock.backward_end()
        self.clock.optimizer_begin()
        self.spend(STEP)
        self.clock.optimizer_end(0)
        self.spend(OTHER)

    def seconds(self, phase: str) -> float | None:
        """What the device's clock says of a phase."""
        self.probe.publish()
        return self.record.snapshot().values.get(series_key(DEVICE_PHASE_SECONDS.name, {"phase": phase}))


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    guard.reset()
    device = FakeDevice()
    monkeypatch.setattr(clocks, "monotonic_ns", lambda: device.now)
    record = RecordWriter(tmp_path, {"run": "scripted", "rank": 0})
    probe: DeviceProbe
    clock = StepClock(record, lambda now: probe.after_step(now))
    probe = DeviceProbe(record, clock, device)
    probe.look()
    yield Rig(device, record, clock, probe)
    assert guard.faults() == {}


def test_phases_are_timed_by_the_device_once_it_has_passed_them(rig: Rig) -> None:
    for _ in range(40):
        rig.step()
    assert rig.seconds("forward") is None, "nothing is finished yet"
    rig.device.finished = rig.device.now
    rig.step()
    sampled = (rig.seconds("optimizer") or 0) / (STEP / 1e9)
    assert 8 <= sampled <= 11, "one step in four"
    assert rig.seconds("forward") == pytest.approx(sampled * FORWARD / 1e9)
    assert rig.seconds("backward") == pytest.approx(sampled * BACKWARD / 1e9)
    assert rig.seconds("data") == pytest.approx(sampled * WAIT / 1e9)
    assert (rig.seconds("other") or 0) <= (sampled + 1) * OTHER / 1e9


def test_an_evaluation_is_no_phase_of_a_step(rig: Rig) -> None:
    for _ in range(9):
        rig.step(evaluate=True)
    rig.device.finished = rig.device.now
    rig.step()
    total = sum(rig.seconds(phase) or 0 for phase in ("data", "forward", "backward", "optimizer", "other"))
    assert 0 < total < 4 * (WAIT + FORWARD + BACKWARD + STEP + OTHER) / 1e9


def test_a_forward_in_eval_mode_that_trains_is_a_forward(rig: Rig) -> None:
    def step() -> None:
        rig.clock.forward_begin(clocks.EITHER)
        rig.spend(FORWARD)
        rig.clock.forward_end()
        rig.clock.backward_begin()
        rig.spend(BACKWARD)
        rig.clock.backward_end()
        rig.clock.optimizer_begin()
        rig.spend(STEP)
        rig.clock.optimizer_end(0)

    for _ in range(20):
        step()
    rig.device.finished = rig.device.now
    step()
    assert rig.seconds("forward") == pytest.approx((rig.seconds("backward") or 0) * FORWARD / BACKWARD)


def test_events_are_reused_over_many_steps(rig: Rig) -> None:
    for _ in range(30):
        rig.step()
        rig.device.finished = rig.device.now
    made = len(rig.device.events)
    for _ in range(3000):
        rig.step()
        rig.device.finished = rig.device.now
    assert len(rig.device.events) == made < 40
    assert rig.device.recorded > 3000


def test_a_device_far_behind_costs_a_fixed_number_of_events(rig: Rig) -> None:
    for _ in range(2000):
        rig.step()
    assert len(rig.device.events) <= (STEPS_IN_FLIGHT + 1) * 12
    rig.device.finished = rig.device.now
    rig.step()
    rig.step()
    assert len(rig.probe.waiting) <= 1, "it caught up"


def test_accumulation_over_many_batches_is_cut_off(rig: Rig) -> None:
    for _ in range(8):
        for _ in range(100):
            rig.clock.fetch_begin(False)
            rig.clock.fetch_end(True, 4.0)
            rig.clock.forward_begin(TRAIN)
            rig.clock.forward_end()
            rig.clock.backward_begin()
            rig.clock.backward_end()
        rig.clock.optimizer_begin()
        rig.clock.optimizer_end(0)
    assert max(map(len, rig.probe.waiting)) <= MARKS_PER_STEP


def test_counters_are_written_at_most_ten_times_a_second(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(devices, "read_counters", lambda probe: written.append(rig.device.now))
    began = rig.device.now
    for _ in range(400):
        rig.step()
    most = (rig.device.now - began) / COUNTERS_NANOSECONDS + 1
    assert most / 2 < len(written) <= most
    assert all(later - earlier >= COUNTERS_NANOSECONDS for earlier, later in itertools.pairwise(written))


def test_counters_come_into_the_record_and_unknown_ones_stay_out(rig: Rig) -> None:
    rig.device.numbers = counters_of(
        allocated_bytes=10,
        active_bytes=15,
        active_peak_bytes=20,
        reserved_bytes=30,
        capacity_bytes=None,
        alloc_retries=5,
        ooms=0,
    )
    rig.step()
    rig.step()
    values = rig.record.snapshot().values
    read = {metric: values.get(metric.name) for metric in (DEVICE_ALLOCATED, DEVICE_ACTIVE_PEAK, DEVICE_RESERVED)}
    assert list(read.values()) == [10, 20, 30]
    assert values[ALLOC_RETRIES.name] == 5 and values[OOMS.name] == 0
    assert DEVICE_CAPACITY.name not in values


def test_a_device_that_is_not_in_use_is_not_asked_for_anything(rig: Rig) -> None:
    rig.device.initialized = False
    counted = rig.device.counted
    rig.probe.look()
    for _ in range(50):
        rig.step()
    assert (rig.device.events, rig.device.counted) == ([], counted)
    rig.device.initialized = True
    rig.probe.look()
    for _ in range(9):
        rig.step()
    assert rig.device.events and rig.device.counted


def test_nothing_is_recorded_into_a_graph_that_is_being_captured(rig: Rig) -> None:
    for _ in range(4):
        rig.step()
    rig.device.capturing = True
    recorded = rig.device.recorded
    for _ in range(8):
        rig.step()
    assert rig.device.recorded == recorded


def test_after_the_end_nothing_is_recorded(rig: Rig) -> None:
    for _ in range(9):
        rig.step()
    rig.probe.stop()
    recorded, counted = rig.device.recorded, rig.device.counted
    for _ in range(40):
        rig.step()
    assert (rig.device.recorded, rig.device.counted) == (recorded, counted)


def train_with(device: FakeDevice, steps: int, monkeypatch: pytest.MonkeyPatch) -> gpuwatch.Watch:
    """A real loop whose session asks this device."""
    monkeypatch.setattr(devices, "CudaAccelerator", lambda: device)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2 * steps, 4)), batch_size=2)
    watch = gpuwatch.attach(model, loader)
    assert attaching._active is not None
    attaching._active.session.device.look()
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        device.now += MILLISECOND
        device.finished = device.now
    return watch


def test_a_real_loop_is_timed_also_when_only_some_steps_are_looked_at(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    watch = train_with(device, 60, monkeypatch)
    dense = device.recorded
    watch.detach()
    assert dense > 0
    device = FakeDevice()
    watch = train_with(device, 400, monkeypatch)
    made, recorded = len(device.events), device.recorded
    watch.detach()
    assert recorded > dense, "looks go on"
    assert made < 40
    assert watch._last is not None
    values = watch._last.values
    assert {"forward", "backward", "optimizer", "data"} <= {
        phase
        for phase in ("forward", "backward", "optimizer", "data")
        if series_key(DEVICE_PHASE_SECONDS.name, {"phase": phase}) in values
    }
    assert guard.faults() == {}


@pytest.mark.faults_expected
def test_a_device_that_fails_is_let_alone_and_training_goes_on(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeDevice):
        def event(self) -> FakeEvent:
            raise RuntimeError("device lost")

    device = Broken()
    train_with(device, 80, monkeypatch).detach()
    assert guard.faults()["device"] == guard.LIMIT
    guard.reset()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_without_cuda_the_accelerator_is_never_ready() -> None:
    assert CudaAccelerator().ready() is False
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_cuda_times_phases_and_reads_its_allocator(records: Path) -> None:
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model)
    for _ in range(200):
        optimizer.zero_grad()
        model(torch.ones(256, 512, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    for _ in range(40):
        optimizer.step()
    watch.detach()
    assert watch._last is not None
    values = watch._last.values
    for phase in ("forward", "backward", "optimizer"):
        assert values[series_key(DEVICE_PHASE_SECONDS.name, {"phase": phase})] > 0
    assert values[DEVICE_ALLOCATED.name] >= 512 * 512 * 4
    assert values[DEVICE_CAPACITY.name] > 1 << 30
    assert guard.faults() == {}


@pytest.mark.gpu
@needs_gpu
def test_cuda_is_not_ready_while_a_graph_is_captured() -> None:
    accelerator = CudaAccelerator()
    static = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    assert accelerator.ready()
    with torch.cuda.graph(graph):
        _ = static * 2
        ready = accelerator.ready()
    assert not ready and accelerator.ready()
