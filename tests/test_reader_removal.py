"""Records of ended runs are removed in the end; those of living processes and of other users are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwatch.layout import (
    SUFFIX,
)
from gpuwatch.reader import remove_old
from tests.recorded import write_run


def aged(directory: Path, count: int) -> list[Path]:
    """Ended records, each a minute older than the one before."""
    paths = []
    for number in range(count):
        path = write_run(directory, f"run-{number}", steps=3).path
        os.utime(path, (1_000_000_000 - 60 * number,) * 2)
        paths.append(path)
    return paths


def test_the_newest_ended_records_are_kept(tmp_path: Path) -> None:
    paths = aged(tmp_path, 6)
    assert remove_old(tmp_path, 4) == 2
    assert sorted(path.exists() for path in paths) == [False, False, True, True, True, True]
    assert not paths[5].exists() and not paths[4].exists()


HOLD = "import sys, time; from pathlib import Path; from gpuwatch.record import RecordWriter; " + (
    "writer = RecordWriter(Path(sys.argv[1]), {'run': 'live', 'rank': 0}); print(writer.path, flush=True); "
    "time.sleep(60)"
)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Starts processes that hold a record."""
    processes = []

    def start() -> Path:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return Path(process.stdout.readline().strip())

    yield start
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_records_of_living_processes_are_kept_however_old(tmp_path: Path, live: Callable[[], Path]) -> None:
    held = live()
    os.utime(held, (0, 0))
    paths = aged(tmp_path, 3)
    assert remove_old(tmp_path, 0) == 3
    assert held.exists() and not any(path.exists() for path in paths)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_records_of_other_users_and_other_files_are_kept(tmp_path: Path) -> None:
    paths = aged(tmp_path, 4)
    os.chown(paths[3], 12345, 12345)
    link = tmp_path / f"link{SUFFIX}"
    link.symlink_to(paths[0])
    other = tmp_path / "notes.txt"
    other.write_text("")
    assert remove_old(tmp_path, 0) == 3
    assert paths[3].exists() and link.is_symlink() and other.exists()


def test_attach_removes_old_records_and_keeps_its_own_lease(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import gpuwatch
    from gpuwatch import config

    monkeypatch.setattr(config, "KEPT_RECORDS", 2)
    old = aged(records, 5)
    in_the_future = time.time() + 1000
    for path in old[:2]:
        os.utime(path, (in_the_future, in_the_future))  # newer than this run's own, by a clock that was put back
    watch = gpuwatch.attach(torch.nn.Linear(2, 2), name="mine")
    assert [path.exists() for path in old] == [True, True, False, False, False]
    ask = "import sys; from pathlib import Path; from gpuwatch.reader import read_all; " + (
        "print([seen.up for seen in read_all(Path(sys.argv[1]))[0] if seen.run == 'mine'])"
    )
    done = subprocess.run([sys.executable, "-c", ask, str(records)], capture_output=True, text=True, check=True)
    assert done.stdout == "[True]\n"
    watch.detach()
