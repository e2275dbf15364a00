"""Time that a hypervisor takes: counted as time without a core, in proportion to CPU time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuwatch_hooks import contention, stolen
from gpuwatch_hooks.contention import CoreWait
from gpuwatch_hooks.workers import Sums, Workers

SECOND = 10**9

Passing = Callable[[int, int], None]
"""So many ticks pass that something runs, and so many that are stolen."""


@pytest.fixture
def passing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Passing:
    """A machine whose kernel tells of what passes, and is read each time."""
    stat = tmp_path / "stat"
    machine = stolen.Machine()
    monkeypatch.setattr(stolen, "STAT", str(stat))
    monkeypatch.setattr(stolen, "machine", machine)
    sums = [5000, 10]

    def pass_by(ran: int, taken: int) -> None:
        sums[0] += ran
        sums[1] += taken
        stat.write_text(f"cpu  {sums[0] - 40} 10 20 9999 77 4 6 {sums[1]} 0 0\ncpu0 1 2 3\n")
        machine._due = 0

    pass_by(0, 0)
    return pass_by


def test_what_is_stolen_is_in_proportion_to_cpu_time(passing: Passing) -> None:
    time = stolen.StolenTime()
    assert time.note(3 * SECOND) == 0
    passing(400, 100)
    assert time.note(5 * SECOND) == SECOND // 2
    passing(200, 0)
    assert time.note(6 * SECOND) == SECOND // 2


def test_cpu_time_between_two_readings_of_the_machine_is_kept(passing: Passing) -> None:
    time = stolen.StolenTime()
    time.note(0)
    time.note(SECOND)
    passing(400, 400)
    assert time.note(2 * SECOND) == 2 * SECOND


@pytest.mark.parametrize("text", [None, "", "cpu  1 2 3\n", "intr many\n"], ids=["none", "empty", "old", "other"])
def test_a_kernel_that_does_not_tell_takes_nothing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    monkeypatch.setattr(stolen, "STAT", str(stat))
    monkeypatch.setattr(stolen, "machine", stolen.Machine())
    time = stolen.StolenTime()
    assert [time.note(cpu) for cpu in (0, SECOND)] == [0, 0]


def test_the_kernel_is_not_asked_again_at_once(passing: Passing) -> None:
    stolen.machine.read()
    due = stolen.machine._due
    Path(stolen.STAT).unlink()
    stolen.machine.read()
    assert (stolen.machine.ran, stolen.machine.stolen, stolen.machine._due) == (5000, 10, due)


def test_the_training_thread_waits_for_a_core_that_was_stolen(
    passing: Passing, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = iter([(1, 0), (1, 0), (2, 7 * SECOND), (2, 7 * SECOND)])
    cpu = iter([0, 0, 2 * SECOND, 50 * SECOND, 50 * SECOND, 51 * SECOND])
    monkeypatch.setattr(contention, "_run_delay", lambda: next(threads))
    monkeypatch.setattr(contention, "thread_time_ns", lambda: next(cpu))
    record: Any = SimpleNamespace(values={}, series=lambda name: name)
    wait = CoreWait(record)
    told = []
    for _ in range(4):
        wait.publish()
        told += record.values.values()
        passing(100, 50)
    assert told == [0, 1, 1, 1.5]


def worked(cpu: float, made: float) -> Any:
    """Workers that have made batches for so long, on a core for part of it."""
    sums = Sums(batches=10, made=int(made * SECOND), cpu=int(cpu * SECOND), lived=int(20 * made * SECOND))
    return SimpleNamespace(sums=lambda now: sums, largest=lambda word: 0)


@pytest.mark.parametrize(("taken", "blocked", "waited"), [(0, 0.5, None), (1000, 0.0, 0.025)], ids=["none", "half"])
def test_workers_whose_cores_were_stolen_are_not_blocked(
    passing: Passing, taken: int, blocked: float, waited: float | None
) -> None:
    workers = Workers()
    workers.groups = [worked(1, 2)]
    workers.tick()
    passing(1000, taken)
    workers.groups = [worked(11, 22)]
    known = dict(workers.readings(workers.tick()))
    assert known["gpuwatch_loader_worker_blocked_ratio"] == pytest.approx(blocked, abs=0.06)
    assert known.get("gpuwatch_loader_worker_cpu_wait_ratio") == (
        None if waited is None else pytest.approx(waited, abs=0.005)
    )
