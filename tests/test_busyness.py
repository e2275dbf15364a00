"""Whether a silent rank is at work: what the kernel counts of its process and its children, and whose GPUs are idle."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpuwatch import busyness
from gpuwatch.busyness import Busyness, work_seconds
from gpuwatch.layout import Phase, State
from gpuwatch.nvml import GpuReading
from gpuwatch.reader import Snapshot

TICKS = os.sysconf("SC_CLK_TCK")
SILENT = Snapshot(
    path=Path("/records/run.0.gpw"),
    uid=1000,
    identity={"run": "run", "rank": 0, "device": "cpu"},
    up=True,
    pid=70,
    created=1e9,
    ended=None,
    step=100,
    step_age=100.0,
    progress_age=100.0,
    run_seconds=50.0,
    phase=Phase.OTHER,
    state=State.RUNNING,
    values={},
    series=(),
    ring=(),
    observations=(),
)
ON_GPU = replace(SILENT, identity={**SILENT.identity, "device": "cuda"})


def process(root: Path, pid: int, seconds: float, children: str = "", waited: float = 0.0) -> None:
    """A process, as the kernel tells of it, that took so much CPU time and waited for a core."""
    task = root / str(pid) / "task" / str(pid)
    task.mkdir(parents=True, exist_ok=True)
    (root / str(pid) / "schedstat").write_text(f"{int(seconds * 1e9)} {int(waited * 1e9)} 7\n")
    (root / str(pid) / "stat").write_text(f"{pid} (a ) b) R 1" + " 0" * 9 + f" {int(seconds * TICKS)} 0 0 0 20 0\n")
    (task / "children").write_text(children)


def test_the_children_of_a_process_count_and_one_that_is_gone_does_not(tmp_path: Path) -> None:
    process(tmp_path, 70, 2.0, "71 72 ")
    process(tmp_path, 71, 3.0, "73", waited=10.0)
    process(tmp_path, 73, 1.5)
    assert work_seconds(70, tmp_path) == pytest.approx(16.5)
    assert work_seconds(72, tmp_path) is None
    assert (work_seconds(os.getpid()) or 0) > 0


class Clock:
    """Time that passes when it is told to; the rank's process and what it takes of it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.spent = 0.0
        self.root = root
        self.busyness = Busyness(root)
        monkeypatch.setattr(busyness, "_process_of", lambda path: 70)
        monkeypatch.setattr("gpuwatch.busyness.time.monotonic", lambda: self.now)

    def scrapes(
        self, seconds: float, cores: float, rank: Snapshot = SILENT, gpus: tuple[GpuReading, ...] = ()
    ) -> float | None:
        """Scrape every fifteen seconds for so long; what the last one says."""
        said = None
        for _ in range(int(seconds / 15)):
            self.now += 15
            self.spent += 15 * cores
            process(self.root, 70, self.spent)
            said = self.busyness.cores(rank, gpus)
        return said


def test_a_silent_rank_is_as_busy_as_it_was_in_the_last_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(tmp_path, monkeypatch)
    assert clock.scrapes(30, 0.9) is None, "too short to tell"
    assert clock.scrapes(600, 0.9) == pytest.approx(0.9, abs=0.01)
    assert clock.scrapes(150, 0.0) == pytest.approx(0.0, abs=0.01), "and then it is stuck"
    assert clock.scrapes(15, 1.0, replace(SILENT, run_seconds=60.0)) is None, "it was heard of since"
    assert clock.scrapes(600, 1.0, replace(SILENT, progress_age=50.0)) is None, "not silent for long"


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ((), False),
        ((GpuReading(0, utilization_ratio=0.0, processes=((70, None),)),), True),
        ((GpuReading(0, utilization_ratio=1.0, processes=((70, None),)),), False),
        ((GpuReading(0, utilization_ratio=None, processes=((70, None),)),), False),
        ((GpuReading(0, utilization_ratio=0.0, processes=((71, None),)), GpuReading(1)), False),
        (
            (
                GpuReading(0, utilization_ratio=0.0, processes=((70, None),)),
                GpuReading(1, utilization_ratio=1.0, processes=((71, None),)),
            ),
            True,
        ),
    ],
    ids=["no NVML", "idle", "in a kernel", "not known", "nobody's", "another's is not"],
)
def test_a_rank_on_a_gpu_is_at_work_only_where_that_is_idle(
    gpus: tuple[GpuReading, ...], told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (Clock(tmp_path, monkeypatch).scrapes(300, 1.0, ON_GPU, gpus) is not None) is told


def test_a_rank_whose_process_cannot_be_seen_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tmp_path, monkeypatch)
    monkeypatch.setattr(busyness, "_process_of", lambda path: None)
    assert clock.scrapes(300, 1.0) is None
    clock.busyness.keep(())
