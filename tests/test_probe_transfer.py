"""Copies of batches to the device, on a scripted one: how long they take, and whether they are waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwatch.advisor import advise
from gpuwatch.catalog import BATCH_PINNED, LOADER_BATCH_BYTES, LOADER_PART_SECONDS, LOADER_WORKERS
from gpuwatch.expr import series_key
from gpuwatch.layout import State
from gpuwatch.reader import read
from gpuwatch.rulebook import RULES_BY_ID
from gpuwatch_hooks.accelerator import Event
from gpuwatch_hooks.ledger import BACKWARD, DATA, EPOCH_START, FORWARD, OPTIMIZER, OTHER, PENDING
from gpuwatch_hooks.transfer import TransferProbe
from tests.recorded import write_run

MIB = 1 << 20
COPY = series_key(LOADER_PART_SECONDS.name, {"part": "copy"})
BLOCKING, PAGEABLE = "data-h2d-blocking", "data-h2d-pageable"


class Clock:
    """The device's clock: it has passed what lies before ``now``, in milliseconds."""

    now = 0.0


class Mark:
    """An event at a moment of the device's clock."""

    def __init__(self, clock: Clock, at: float) -> None:
        self.clock = clock
        self.at = at

    def record(self) -> None:
        """Nothing to do."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        return self.clock.now >= self.at

    def elapsed_time(self, end: Event, /) -> float:
        """Milliseconds."""
        assert isinstance(end, Mark)
        return end.at - self.at


class Run:
    """A run on that device, with batches of one size. Steps of 100 ms."""

    def __init__(self, directory: Path, size: float | None = 48 * MIB, pinned: bool = True) -> None:
        known = {BATCH_PINNED.name: float(pinned), LOADER_WORKERS.name: 2.0}
        self.writer = write_run(directory, state=None, values=known if size is None else {
            **known, LOADER_BATCH_BYTES.name: size
        })  # fmt: skip
        self.probe = TransferProbe(self.writer)
        self.clock = Clock()

    def steps(
        self, count: int, copy: float, backlog: float, waits: bool, first: int = DATA, forward: int = FORWARD
    ) -> Run:
        """So many steps: milliseconds of the copy and of the work that is left at the batch's arrival."""
        for _ in range(count):
            came = self.clock.now
            arrival = Mark(self.clock, came + backlog)
            begin = Mark(self.clock, came + backlog + copy)
            marks: list[tuple[int, Event]] = [(first, Mark(self.clock, came - 1)), (OTHER, arrival)]
            self.probe.marked(marks)
            self.clock.now = begin.at if waits else came + 0.1
            marks.append((forward, begin))
            self.probe.marked(marks)
            marks += [(BACKWARD, Mark(self.clock, begin.at + 30)), (OPTIMIZER, Mark(self.clock, begin.at + 60))]
            self.clock.now = begin.at + 100
            self.probe.passed(marks)
        return self

    def copy(self) -> float | None:
        """Seconds of a copy, as published."""
        self.probe.publish()
        return self.writer.snapshot().values.get(COPY)

    def found(self) -> set[str]:
        """The rules on copies that hold."""
        self.probe.publish()
        self.writer.close(State.CLEAN)
        rules = [RULES_BY_ID[BLOCKING], RULES_BY_ID[PAGEABLE]]
        return {finding.rule for finding in advise(read(self.writer.path), rules)}


def test_copies_from_pageable_memory_are_timed_and_found(tmp_path: Path) -> None:
    run = Run(tmp_path, pinned=False).steps(12, copy=14, backlog=3, waits=True)
    assert run.copy() == pytest.approx(0.014)
    assert run.found() == {PAGEABLE}


def test_pinned_copies_that_are_waited_for_are_found(tmp_path: Path) -> None:
    assert Run(tmp_path).steps(12, copy=2, backlog=20, waits=True).found() == {BLOCKING}


def test_pinned_copies_that_are_not_waited_for_are_quiet(tmp_path: Path) -> None:
    assert Run(tmp_path).steps(12, copy=2, backlog=20, waits=False).found() == set()


def test_a_device_that_waits_for_the_program_tells_nothing_of_copies(tmp_path: Path) -> None:
    run = Run(tmp_path).steps(12, copy=2, backlog=0, waits=True)
    assert not run.probe.waited and run.found() == set()


@pytest.mark.parametrize("pinned", [True, False])
def test_work_between_batch_and_forward_is_not_taken_for_a_copy(pinned: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, pinned=pinned).steps(12, copy=80, backlog=5, waits=True)
    assert run.copy() is None and run.found() == set()


def test_copies_of_batches_whose_size_is_not_known_are_not_judged(tmp_path: Path) -> None:
    run = Run(tmp_path, size=None).steps(12, copy=14, backlog=20, waits=True)
    assert run.copy() is None and run.found() == set()


def test_small_batches_are_quiet(tmp_path: Path) -> None:
    assert Run(tmp_path, size=4096, pinned=False).steps(12, copy=0.2, backlog=3, waits=True).found() == set()


def test_a_few_steps_are_not_enough(tmp_path: Path) -> None:
    assert Run(tmp_path).steps(7, copy=2, backlog=20, waits=True).found() == set()


def test_copies_that_are_no_longer_waited_for_are_taken_back(tmp_path: Path) -> None:
    run = Run(tmp_path).steps(12, copy=2, backlog=20, waits=True)
    run.probe.publish()
    assert run.steps(40, copy=2, backlog=20, waits=False).found() == set()


def test_the_first_batch_of_an_epoch_and_a_forward_in_eval_mode_count_too(tmp_path: Path) -> None:
    run = Run(tmp_path).steps(12, copy=2, backlog=20, waits=True, first=EPOCH_START, forward=PENDING)
    assert run.copy() == pytest.approx(0.002) and run.found() == {BLOCKING}
