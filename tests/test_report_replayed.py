"""A snapshot beside a record: the findings on the allocator say what a replay of it says."""

from __future__ import annotations

import pickle
from pathlib import Path

from gpuwatch.layout import SNAPSHOT_SUFFIX, State
from gpuwatch.reader import read, remove_old
from gpuwatch.record import RecordWriter
from gpuwatch.report.document import findings_of
from tests.tracemaking import random_run


def out_of_memory(directory: Path) -> Path:
    """The record of a run that ran out of memory."""
    record = RecordWriter(directory, {"run": "short", "rank": 0})
    record.observe("mem-oom", "train.py:9 (main)", "capacity", 1.0)
    record.close(State.EXCEPTION)
    return record.path


def evidence(path: Path) -> str:
    """What its finding says."""
    (finding,) = [finding for finding in findings_of([read(path)]) if finding["rule"] == "mem-oom"]
    return str(finding["evidence"])


def test_a_snapshot_beside_the_record_is_replayed(tmp_path: Path) -> None:
    path = out_of_memory(tmp_path)
    assert "replayed" not in evidence(path)
    path.with_suffix(SNAPSHOT_SUFFIX).write_bytes(pickle.dumps(random_run(1, "", 200).snapshot()))
    assert "replayed from its own allocations: " in evidence(path)


def test_what_is_no_snapshot_says_nothing(tmp_path: Path) -> None:
    path = out_of_memory(tmp_path)
    path.with_suffix(SNAPSHOT_SUFFIX).write_bytes(b"no pickle")
    assert "replayed" not in evidence(path)


def test_a_snapshot_goes_with_its_record(tmp_path: Path) -> None:
    path = out_of_memory(tmp_path)
    path.with_suffix(SNAPSHOT_SUFFIX).write_bytes(b"")
    assert remove_old(tmp_path, keep=0) == 1 and not list(tmp_path.iterdir())
