"""Foreign processes on a GPU: told only where it is certain whose the others are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwatch.neighbours import foreign, parent, with_neighbours
from gpuwatch.nvml import GpuReading
from tests.recorded import write_run

PARENTS = {300: 200, 200: 100, 100: 1, 900: 1, 901: 900}


@pytest.mark.parametrize(
    ("processes", "strangers"),
    [
        (((100, 5 << 30),), ()),
        (((100, 5 << 30), (300, 1 << 30)), ()),  # a worker of a worker of the rank
        (((100, 5 << 30), (900, 2 << 30), (901, 1 << 30)), ((900, 2 << 30), (901, 1 << 30))),
        (((900, 2 << 30),), None),  # no watched rank on it: it may be a rank of a container
        (((100, 5 << 30), (900, None)), None),
        ((), None),
        (None, None),
    ],
)
def test_what_descends_from_no_watched_rank_is_foreign(
    processes: tuple[tuple[int, int | None], ...] | None, strangers: tuple[tuple[int, int], ...] | None
) -> None:
    assert foreign(processes, {100}, PARENTS.get) == strangers


def test_parents_are_those_of_the_system() -> None:
    assert parent(os.getpid()) == os.getppid()
    assert parent(1 << 30) is None


def test_a_living_rank_and_a_stranger_are_told_apart(tmp_path: Path) -> None:
    # The rank lives in another process: this one's own locks do not count.
    code = (
        "import sys; from pathlib import Path; from tests.recorded import write_run; "
        f"kept = write_run(Path({str(tmp_path)!r}), state=None); print('there', flush=True); sys.stdin.read()"
    )
    root = Path(__file__).resolve().parent.parent
    rank = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None and rank.stdout.readline() == "there\n"
    processes = ((rank.pid, 7 << 30), (os.getpid(), 3 << 30))
    read = with_neighbours(lambda: [GpuReading(0, processes=processes), GpuReading(1)], tmp_path)
    first, second = read()
    rank.communicate()
    assert (first.foreign_processes, second.foreign_processes) == (((os.getpid(), 3 << 30),), None)


def test_records_of_the_dead_make_nobody_ours(tmp_path: Path) -> None:
    write_run(tmp_path)
    read = with_neighbours(lambda: [GpuReading(0, processes=((os.getpid(), 1 << 30),))], tmp_path)
    assert [each.foreign_processes for each in read()] == [None]
