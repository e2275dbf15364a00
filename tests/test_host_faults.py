"""Every guarded point of the hooks made to raise at every call: the training does not notice."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gpuwatch
from gpuwatch.catalog import GUARD_FAULTS
from gpuwatch.expr import series_key
from gpuwatch.reader import read_all
from gpuwatch_hooks import attach, guard, session
from tests.outcomes import outcome
from tests.trainings import TRAININGS, Attach, Training

PROBES = sorted(guard.POINTS)
REACHED = frozenset(
    [
        "attach",
        "backward",
        "clock",
        "detach",
        "exit",
        "findings",
        "forward",
        "hiding",
        "loader",
        "memory",
        "modes",
        "optimizer",
        "tick",
    ]
)
"""Probes that this training certainly calls; others wait for an accelerator, a fork, a shortage of memory."""


def everything(watch: Attach) -> list[object]:
    """Trainings that come through as many points as possible: validations, copies; a collection."""
    names = ("perceptron with 0 workers", "copies of the model")
    computed = [part for name in names for part in TRAININGS[name](watch)]
    gc.collect()
    return computed


@contextmanager
def broken(probes: list[str], fault: Callable[..., object]) -> Iterator[None]:
    """Put ``fault`` in the place of every guarded function of these probes."""
    points = [point for probe in probes for point in guard.POINTS[probe]]
    functions = [point.function for point in points]
    for point in points:
        point.function = point.run = fault
    try:
        yield
    finally:
        for point, function in zip(points, functions, strict=True):
            point.function = point.run = function


def planted(*arguments: object) -> None:
    """What a broken probe does."""
    raise LookupError("planted")


def watched_outcome(training: Training) -> dict[str, str]:
    """The training's outcome while it is watched, with everything else a user can call."""
    watches: list[gpuwatch.Watch] = []

    def watch(*arguments: object) -> None:
        watches.append(gpuwatch.attach(*arguments))  # type: ignore[arg-type]

    result = outcome(training, watch)
    for one in watches:
        assert isinstance(one.findings(), list)
        one.detach()
    attach.farewell()
    return result


@pytest.fixture(autouse=True)
def many_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "TICK_NANOSECONDS", 4_000_000)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return outcome(everything, lambda *arguments: None)


@pytest.mark.faults_expected
@pytest.mark.parametrize("probe", PROBES)
def test_a_broken_probe_changes_nothing_and_is_switched_off(
    probe: str, expected: dict[str, str], records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with broken([probe], planted), caplog.at_level(logging.WARNING, "gpuwatch"):
        assert watched_outcome(everything) == expected
        faults = guard.faults()
    assert set(faults) <= {probe}
    count = faults.get(probe, 0)
    assert count or probe not in REACHED, "the fault was planted where the training comes by"
    assert count <= guard.LIMIT
    snapshots, rejected = read_all(records)
    assert not rejected
    logged = [record.args[0] for record in caplog.records if record.exc_info and isinstance(record.args, tuple)]
    assert logged == [probe] * len(logged) and len(logged) <= max(1, len(snapshots)), "once a run"
    if count and probe not in ("attach", "findings", "exit"):  # those come before the record or after its end
        assert snapshots[-1].values[series_key(GUARD_FAULTS.name, {"probe": probe})] == count


@pytest.mark.faults_expected
def test_all_probes_broken_at_once_change_nothing(
    expected: dict[str, str], records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with broken([probe for probe in PROBES if probe != "attach"], planted):
        assert watched_outcome(everything) == expected
        faults = guard.faults()
    assert max(faults.values()) == guard.LIMIT
    assert sum(bool(record.exc_info) for record in caplog.records) == len(faults), "each is logged once"


@pytest.mark.faults_expected
def test_a_log_handler_that_raises_changes_nothing(expected: dict[str, str], records: Path) -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("disk full")

    handler = Raising()
    logging.getLogger("gpuwatch").addHandler(handler)
    try:
        with broken(["forward", "backward"], planted):
            assert watched_outcome(everything) == expected
    finally:
        logging.getLogger("gpuwatch").removeHandler(handler)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("probe", ["attach", "loader", "forward", "backward", "optimizer", "modes"])
def test_what_ends_the_program_passes_through(probe: str, ending: type[BaseException], records: Path) -> None:
    def ends(*arguments: object) -> None:
        raise ending

    with broken([probe], ends), pytest.raises(ending):
        outcome(everything, gpuwatch.attach)
    assert not guard.faults()


@pytest.mark.faults_expected
def test_a_new_run_begins_with_all_probes_on(records: Path) -> None:
    with broken(["forward"], planted):
        watched_outcome(TRAININGS["LBFGS"])
        assert guard.faults() == {"forward": guard.LIMIT}
    watched_outcome(TRAININGS["LBFGS"])
    assert not guard.faults()
    assert os.getpid() == read_all(records)[0][-1].pid


@pytest.mark.faults_expected
def test_a_run_that_cannot_be_begun_leaves_no_record(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = TRAININGS["LBFGS"]
    expected = outcome(usual, lambda *arguments: None)
    monkeypatch.setattr(session, "PrecisionProbe", planted)
    assert outcome(usual, gpuwatch.attach) == expected
    assert guard.faults() == {"attach": 1}
    assert read_all(records) == ([], [])
