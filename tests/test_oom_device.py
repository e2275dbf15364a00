"""Out of memory on a device: the real error raised in real loops, on a scripted allocator; who held what, and for how
long it would have lasted."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.advisor import Finding, advise
from gpuwatch.catalog import DEVICE_FULL_SECONDS, OUT_OF_MEMORY
from gpuwatch.reader import read
from gpuwatch_hooks import attach as attaching
from gpuwatch_hooks import device as devices
from gpuwatch_hooks import ending
from gpuwatch_hooks import session as sessions
from tests.loops import loader_of, only, perceptron
from tests.programs import Programs
from tests.scripted_device import GIB, MIB, Bench, ScriptedAccelerator

MESSAGE = (
    "CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 79.10 GiB of which {free} is free. "
    "Process 4711 has 77.90 GiB memory in use. Of the allocated memory 76.02 GiB is allocated by PyTorch, and 1.23 GiB "
    "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def out_of_memory(size: str = "2.00 GiB", free: str = "1.20 GiB") -> torch.OutOfMemoryError:
    """The error as torch words it."""
    return torch.OutOfMemoryError(MESSAGE.format(size=size, free=free))


@pytest.fixture
def device(records: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedAccelerator:
    """A healthy device that every session asks."""
    scripted = ScriptedAccelerator()
    monkeypatch.setattr(devices, "CudaAccelerator", lambda: scripted)
    return scripted


class Failing(nn.Module):
    """A model whose forward runs out of memory when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.error: BaseException | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layers' output."""
        if self.error is not None:
            raise self.error
        output: torch.Tensor = self.layers(inputs)
        return output


def train(
    steps: int, before: Callable[[int, Failing], object], caught: tuple[type[BaseException], ...] = ()
) -> gpuwatch.Watch:
    """A loop that goes on after the errors it catches; ``before`` scripts each step."""
    model, loader = Failing(), loader_of(steps)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    current().device.look()
    for step, (inputs, _) in enumerate(loader):
        before(step, model)
        # What a counter says is read at most ten times a second, a loop of a test is faster.
        current().device._next_counters = 0
        optimizer.zero_grad()
        try:
            model(inputs).sum().backward()
        except caught:
            model.error = None
            continue
        optimizer.step()
    return watch


def current() -> sessions.Session:
    """The session of the run that is attached."""
    assert attaching._active is not None
    return attaching._active.session


def ended_by(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What is found when this error ends the process."""
    monkeypatch.setattr(ending, "uncaught", lambda: error)
    session = current()
    ending.note_uncaught(session)
    assert attaching._active is not None
    (watch,) = attaching._active.watches
    watch.detach()
    return watch.findings()


def fatal(device: ScriptedAccelerator, monkeypatch: pytest.MonkeyPatch, **at_the_end: int) -> Finding:
    """The finding of a run whose 90th step runs out of memory, with these counters as it does."""
    error = out_of_memory()

    def before(step: int, model: Failing) -> None:
        if step == 90:
            device.change(**at_the_end, ooms=(device.now.ooms or 0) + 1)
            model.error = error

    with pytest.raises(torch.OutOfMemoryError):
        train(100, before)
    return only(ended_by(error, monkeypatch), "mem-oom")


# -- the error reaches the user ---------------------------------------------------------------------------------------


def frames(error: BaseException) -> list[tuple[str, str]]:
    """Where the error came through: file and function. torch's own are left out: it has one more where a hook is."""
    passed = [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    return [frame for frame in passed if "site-packages/torch/" not in frame[0]]


@pytest.mark.parametrize("failing", [5, 90], ids=["a step that is looked at", "a step at rest"])
def test_the_error_reaches_the_user_as_it_was_raised(device: ScriptedAccelerator, failing: int) -> None:
    def run(attach: Callable[..., object]) -> BaseException:
        model, loader, error = Failing(), loader_of(100), out_of_memory()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        attach(model, loader)
        try:
            for step, (inputs, _) in enumerate(loader):
                optimizer.zero_grad()
                model.error = error if step == failing else None
                model(inputs).sum().backward()
                optimizer.step()
        except torch.OutOfMemoryError as reached:
            assert reached is error and reached.__context__ is None and reached.__cause__ is None
            assert not hasattr(reached, "__notes__") and reached.args == (str(error),)
            return reached
        raise AssertionError("the error was lost")

    bare = frames(run(lambda model, loader: None))
    assert frames(run(gpuwatch.attach)) == bare


# -- kinds, with what to do first -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "counters", "first"),
    [
        ("spike", {"active_peak_bytes": 79 * GIB, "allocated_bytes": 78 * GIB, "reserved_bytes": 79 * GIB}, "Bucket"),
        ("fragmentation", {"allocated_bytes": 50 * GIB, "reserved_bytes": 78 * GIB}, "`PYTORCH_ALLOC_CONF=expandable"),
        ("foreign", {"allocated_bytes": 44 * GIB, "reserved_bytes": 45 * GIB}, "End the other process"),
        ("capacity", {"allocated_bytes": 47 * GIB, "reserved_bytes": 48 * GIB}, "A smaller micro-batch"),
    ],
)
def test_the_kind_its_numbers_and_the_first_thing_to_do_are_said(
    device: ScriptedAccelerator, monkeypatch: pytest.MonkeyPatch, kind: str, counters: dict[str, int], first: str
) -> None:
    device.used = 80 * GIB if kind != "capacity" else 49 * GIB
    finding = fatal(device, monkeypatch, **counters)
    assert finding.severity == "critical" and f"at step 91: {kind}: " in finding.evidence
    assert "2 GiB were asked for" in finding.evidence and "peak of the steps before 40 GiB" in finding.evidence
    assert f"allocated {counters['allocated_bytes'] // GIB} GiB" in finding.evidence
    assert finding.fix.startswith(first)
    assert "test_oom_device.py" in finding.where and "(forward)" in finding.where


def test_a_step_like_those_before_it_is_no_spike(device: ScriptedAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    device.change(active_peak_bytes=74 * GIB)
    at_the_end = {"active_peak_bytes": 78 * GIB, "allocated_bytes": 77 * GIB, "reserved_bytes": 79 * GIB}
    device.used = 80 * GIB
    assert ": capacity: " in fatal(device, monkeypatch, **at_the_end).evidence


def test_of_the_first_steps_no_peak_is_the_usual_one(
    device: ScriptedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = out_of_memory()

    def before(step: int, model: Failing) -> None:
        if step == 3:  # the optimizer's state was made after the first step
            device.change(active_peak_bytes=79 * GIB, allocated_bytes=78 * GIB, reserved_bytes=79 * GIB)
            model.error = error

    with pytest.raises(torch.OutOfMemoryError):
        train(10, before)
    assert ": capacity: " in only(ended_by(error, monkeypatch), "mem-oom").evidence


def test_a_leak_that_filled_the_device_is_told_from_a_step_that_needs_too_much(
    device: ScriptedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = out_of_memory()

    def before(step: int, model: Failing) -> None:
        grown = 20 * GIB + step * GIB // 2
        device.change(
            allocated_bytes=grown, active_bytes=grown, active_peak_bytes=grown + 10 * GIB, reserved_bytes=grown
        )
        device.used = grown + GIB
        if step == 95:
            model.error = error

    with pytest.raises(torch.OutOfMemoryError):
        train(100, before)
    finding = only(ended_by(error, monkeypatch), "mem-oom")
    assert ": leak: " in finding.evidence and finding.fix.startswith("Let go of what is kept")
    assert "growing: " in finding.evidence and "bytes more at step" in finding.evidence


LEAKING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import gpuwatch

torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.randn(4000, 8)), batch_size=4)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
gpuwatch.attach(model, loader, name="train")
kept = []

def allocate(step):
    kept.append(torch.ones(1 << 18))
    if step == 300:
        raise MemoryError()

for step, (inputs,) in enumerate(loader):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    allocate(step)
"""


def test_a_host_that_a_leak_filled_has_its_holder_and_the_largest_modules_in_the_finding(programs: Programs) -> None:
    ended = programs.run(LEAKING)
    assert ended.status == 1 and "MemoryError" in ended.err
    [record] = ended.records.glob("*.gpw")
    finding = only(advise(read(record)), "mem-oom")
    assert finding.severity == "critical" and "(allocate)" in finding.where
    assert "at step 302: leak: " in finding.evidence and "largest modules: `*` " in finding.evidence
    assert "growing: kept (list) in program.py:" in finding.evidence


# -- errors that are caught -------------------------------------------------------------------------------------------


def test_errors_that_the_program_catches_are_counted_and_weigh_less(device: ScriptedAccelerator) -> None:
    def before(step: int, model: Failing) -> None:
        if step in (70, 71, 80):
            device.change(ooms=(device.now.ooms or 0) + 1)
            model.error = out_of_memory()

    watch = train(400, before, caught=(torch.OutOfMemoryError,))
    watch.detach()
    finding = only(watch.findings(), "mem-oom")
    assert finding.severity == "warn"
    assert "3 out-of-memory errors of the device, caught by the program" in finding.evidence
    assert finding.fix.startswith("Use the batch (or the length) that fits")
    assert OUT_OF_MEMORY.name not in " ".join(current_values(watch))


def current_values(watch: gpuwatch.Watch) -> list[str]:
    """The series of the run's record."""
    assert watch._last is not None
    return list(watch._last.values)


def test_errors_before_attach_and_none_at_all_are_not_spoken_of(device: ScriptedAccelerator) -> None:
    device.change(ooms=4)
    watch = train(120, lambda step, model: None)
    watch.detach()
    assert not [finding for finding in watch.findings() if finding.rule == "mem-oom"]


def test_an_error_in_the_last_step_is_seen_at_the_end(device: ScriptedAccelerator) -> None:
    def before(step: int, model: Failing) -> None:
        if step == 199:
            device.change(ooms=1)
            model.error = out_of_memory()

    watch = train(200, before, caught=(torch.OutOfMemoryError,))
    watch.detach()
    assert "1 out-of-memory error of the device" in only(watch.findings(), "mem-oom").evidence


def test_caught_errors_are_told_with_the_one_that_ended_the_run(
    device: ScriptedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = out_of_memory()

    def before(step: int, model: Failing) -> None:
        if step in (70, 90):
            device.change(ooms=(device.now.ooms or 0) + 1)
            model.error = out_of_memory() if step == 70 else error

    model_errors: list[BaseException] = []
    with pytest.raises(torch.OutOfMemoryError):
        train_catching_one(before, model_errors)
    assert len(model_errors) == 1
    finding = only(ended_by(error, monkeypatch), "mem-oom")
    assert finding.severity == "critical" and "1 before it were caught" in finding.evidence


def train_catching_one(before: Callable[[int, Failing], object], caught: list[BaseException]) -> None:
    """A loop that survives one error."""
    model, loader = Failing(), loader_of(100)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gpuwatch.attach(model, loader)
    current().device.look()
    for step, (inputs, _) in enumerate(loader):
        before(step, model)
        optimizer.zero_grad()
        try:
            model(inputs).sum().backward()
        except torch.OutOfMemoryError as error:
            if caught:
                raise
            caught.append(error)
            model.error = None
            continue
        optimizer.step()


def test_a_count_that_was_reset_goes_on(bench: Bench) -> None:
    bench.steps(20, ooms=0)
    bench.device.change(ooms=2)
    bench.steps(5)
    bench.device.change(ooms=0)
    bench.steps(5)
    bench.device.change(ooms=1)
    bench.steps(5)
    assert "3 out-of-memory errors" in only(bench.findings(), "mem-oom").evidence


def test_on_a_host_a_caught_error_is_not_seen_and_nothing_is_said(records: Path) -> None:
    def before(step: int, model: Failing) -> None:
        if step == 70:
            model.error = MemoryError()
        if step == 75:
            model.error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    watch = train(120, before, caught=(MemoryError, RuntimeError))
    watch.detach()
    assert not [finding for finding in watch.findings() if finding.rule == "mem-oom"]


# -- how long until a leak fills the device ---------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)


def leak(bench: Bench) -> Finding:
    """The finding on the leak."""
    return only(bench.findings(), "leak-device")


GROWTH: dict[str, Any] = dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), 20 * MIB)


def test_a_device_that_is_full_within_two_hours_is_critical_once_a_second_window_agrees(bench: Bench) -> None:
    # 40 GiB are left at the peak: at 20 MiB a step of a second 2,048 s, some 34 minutes.
    bench.steps(65, **GROWTH)
    assert leak(bench).severity == "warn" and bench.value(DEVICE_FULL_SECONDS.name) is None
    assert "at this pace the device is full in about 34 min" in leak(bench).evidence
    bench.steps(60, **GROWTH)
    assert leak(bench).severity == "critical"
    assert bench.value(DEVICE_FULL_SECONDS.name) == pytest.approx(2048, rel=0.02)
    bench.steps(100)
    assert bench.value(DEVICE_FULL_SECONDS.name) is None and "leak-device" not in bench.rules()


def test_a_leak_that_takes_a_day_to_fill_the_device_is_no_emergency(bench: Bench) -> None:
    for _ in range(40):
        bench.now += 160_000_000_000
        bench.steps(4, **GROWTH)
    assert leak(bench).severity == "warn" and "full in about " in leak(bench).evidence
    seconds = bench.value(DEVICE_FULL_SECONDS.name)
    assert seconds is not None and seconds > 20 * 3600


def test_the_time_is_not_said_where_the_capacity_is_not_known(bench: Bench) -> None:
    bench.device.change(capacity_bytes=None)
    bench.steps(130, **GROWTH)
    assert leak(bench).severity == "warn" and "full in" not in leak(bench).evidence
