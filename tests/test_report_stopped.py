"""What the kernel tells of a process that makes no progress."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from gpuwatch.reader import read
from gpuwatch.report.stopped import stopped_evidence
from tests.serving import rank


def process(directory: Path, pid: int, state: str, waits_in: str) -> Path:
    """A directory as /proc, with this one process."""
    place = directory / "proc" / str(pid)
    place.mkdir(parents=True, exist_ok=True)
    (place / "stat").write_text(f"{pid} (a (strange) name) {state} 1 1")
    (place / "wchan").write_text(waits_in)
    return place.parent


@pytest.mark.parametrize(
    ("state", "waits_in", "said"),
    [
        ("R", "0", "its main thread is running"),
        ("D", "io_schedule", "its main thread waits for a device or a file system"),
        ("T", "do_signal_stop", "its main thread is stopped by a signal"),
        ("S", "futex_do_wait", "its main thread waits for a lock or another thread, as in a collective on the CPU"),
        ("S", "hrtimer_nanosleep", "its main thread sleeps"),
        ("S", "poll_schedule_timeout.constprop.0", "its main thread waits for a pipe, a socket or a queue"),
        ("S", "anon_pipe_read", "its main thread waits for a pipe"),
        ("S", "0", None),
        ("S", "", None),
    ],
)
def test_what_the_main_thread_does_is_said(state: str, waits_in: str, said: str | None, tmp_path: Path) -> None:
    with rank(tmp_path / "records") as living:
        (path,) = (tmp_path / "records").glob("*.gpw")
        found = read(path)
        processes = process(tmp_path, living.pid, state, waits_in)
        assert stopped_evidence(found, "run-hang", processes) == said
        assert stopped_evidence(found, "data-stall", processes) is None


def test_a_process_that_is_gone_or_our_own_is_not_looked_at(tmp_path: Path) -> None:
    with rank(tmp_path / "records"):
        (path,) = (tmp_path / "records").glob("*.gpw")
        found = read(path)
        assert stopped_evidence(found, "run-hang", tmp_path) is None
        assert stopped_evidence(dataclasses.replace(found, pid=os.getpid()), "run-hang") is None
    assert stopped_evidence(read(path), "run-hang") is None
    assert stopped_evidence(found, "run-hang") is None
