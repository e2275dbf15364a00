"""Cores, memory and shared memory that are left for loader workers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import gpuwatch
from gpuwatch.catalog import HOST_AVAILABLE, SHARED_MEMORY_TOTAL, SHARED_MEMORY_USED, TRAINING_CORES
from gpuwatch.record import RecordWriter
from gpuwatch_hooks import attach, identity
from gpuwatch_hooks.cgroups import cpu_quota, groups, limited_memory
from gpuwatch_hooks.memory import host_total
from gpuwatch_hooks.resources import ResourceProbe, available_bytes
from tests.loops import Batch, Slow, epochs, perceptron


def files(top: Path, contents: dict[str, str]) -> Path:
    """Files of these contents below a directory."""
    for name, content in contents.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return top


def own(directory: Path, text: str) -> Path:
    """What /proc/self/cgroup says."""
    path = directory / "own"
    path.write_text(text)
    return path


def test_the_quota_of_version_2_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    mount = files(tmp_path / "cgroup", {"job/cpu.max": "350000 100000\n", "job/step/cpu.max": "max 100000\n"})
    assert cpu_quota(mount, own(tmp_path, "0::/job/step\n")) == 3.5
    assert cpu_quota(mount, own(tmp_path, "0::/\n")) is None


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    mount = files(tmp_path / "cgroup", {"cpu.max": "50000 100000\n"})
    assert cpu_quota(mount, own(tmp_path, "0::/not/to/be/seen\n")) == 0.5


def test_the_quota_of_version_1(tmp_path: Path) -> None:
    limited = {"cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}
    mount = files(tmp_path / "cgroup", limited)
    (mount / "cpu").symlink_to(mount / "cpu,cpuacct")
    lines = own(tmp_path, "5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n")
    assert cpu_quota(mount, lines) == 1.5
    files(mount, {"cpu/job/cpu.cfs_quota_us": "-1\n"})
    assert cpu_quota(mount, lines) is None


def test_a_path_out_of_the_mount_is_not_followed(tmp_path: Path) -> None:
    mount = files(tmp_path / "cgroup", {"cpu.max": "max 100000\n"})
    assert list(groups("cpu", mount, own(tmp_path, "0::/../../etc\n")))[-1] == mount
    assert cpu_quota(mount, own(tmp_path, "0::/../../etc\n")) is None


@pytest.mark.parametrize("version", [1, 2])
def test_memory_left_counts_what_can_be_dropped_as_free(tmp_path: Path, version: int) -> None:
    if version == 2:
        contents = {
            "job/memory.max": "1000000\n",
            "job/memory.current": "900000\n",
            "job/memory.stat": "anon 500000\ninactive_file 300000\n",
        }
        mount, lines = files(tmp_path / "cgroup", contents), own(tmp_path, "0::/job\n")
    else:
        contents = {
            "memory/job/memory.limit_in_bytes": "1000000\n",
            "memory/job/memory.usage_in_bytes": "900000\n",
            "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 300000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "5\n",
        }
        mount, lines = files(tmp_path / "cgroup", contents), own(tmp_path, "3:memory:/job\n")
    (group,) = limited_memory(mount, lines)
    assert (group.limit, group.left()) == (1_000_000, 400_000)
    assert available_bytes([group]) == 400_000
    group.usage.unlink()
    assert group.left() is None


def test_the_budget_is_shared_by_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "cpu_quota", lambda: 0.5)
    assert identity.cpu_budget({}) == 0.5
    assert identity.cpu_budget({"LOCAL_WORLD_SIZE": "2"}) == 0.25
    monkeypatch.setattr(identity, "cpu_quota", lambda: None)
    assert identity.cpu_budget({}) == len(os.sched_getaffinity(0))


def test_this_machine_has_memory_and_some_of_it_is_free() -> None:
    available, total = available_bytes(limited_memory()), host_total()
    assert available is not None and total is not None and 0 < available < total


def reading(record: RecordWriter, name: str) -> float:
    """What the record holds for a gauge."""
    return record.values[record.series(name)]


def test_cores_are_those_between_the_first_reading_and_the_last(tmp_path: Path) -> None:
    probe = ResourceProbe(RecordWriter(tmp_path, {"run": "train", "rank": 0}))
    assert probe._training_cores(100.0, 50.0) is None
    assert probe._training_cores(100.1, 50.1) is None, "too short a time"
    assert probe._training_cores(102.0, 53.0) == pytest.approx(1.5)
    for second in range(100):
        cores = probe._training_cores(103.0 + second, 53.0)
    assert cores == 0, "what was long ago does not count"


def burn(seconds: float) -> None:
    """Keep a core busy until this much CPU time is used."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Costly(Slow):
    """Items that cost CPU time in the worker."""

    def __getitem__(self, index: int) -> Batch:
        burn(self.seconds)
        return torch.ones(8), torch.zeros(2)


@pytest.mark.usefixtures("records")
def test_the_workers_cpu_time_is_not_the_training_processs() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(Costly(400, 0.006), batch_size=1, num_workers=1)
    watch = gpuwatch.attach(model, loader)
    session = attach._active.session if attach._active else None
    assert session is not None
    begun = time.monotonic()
    for _, _, (inputs, targets) in epochs(loader, 400):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if time.monotonic() - begun > 2.2:
            break
    watch.detach()
    assert 0 < reading(session.record, TRAINING_CORES.name) < 0.7
    assert reading(session.record, HOST_AVAILABLE.name) > 0
    assert 0 <= reading(session.record, SHARED_MEMORY_USED.name) < reading(session.record, SHARED_MEMORY_TOTAL.name)
