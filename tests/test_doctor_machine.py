"""``gpuwatch doctor``: GPUs, versions and the kernel; each check both ways."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuwatch.doctor import hardware, versions
from gpuwatch.doctor.check import Machine
from gpuwatch.doctor.hardware import gpu_checks
from gpuwatch.doctor.kernel import clock_checks, limit_checks, process_checks, shared_memory_checks
from gpuwatch.doctor.versions import BAD_PAIRS, needed_versions, version_checks
from gpuwatch.nvml import GpuReading, NvmlUnavailable
from gpuwatch.reader import Snapshot, read_all
from gpuwatch.version import __version__
from tests.doctoring import machine, told
from tests.recorded import write_run
from tests.serving import environment

# -- the GPUs ---------------------------------------------------------------------------------------------------------

FULL = GpuReading(
    index=0,
    uuid="GPU-1",
    name="H100",
    utilization_ratio=0.5,
    memory_total_bytes=80 << 30,
    power_watts=300.0,
    temperature_celsius=50.0,
    sm_clock_hertz=1.7e9,
    processes=(),
)
MISSING = "no GPU telemetry: libnvidia-ml.so.1 was not found, so no NVIDIA driver is installed here"


DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"


def unavailable() -> Sequence[GpuReading]:
    raise NvmlUnavailable(MISSING)


def test_gpus_that_answer_are_named_with_the_driver(tmp_path: Path) -> None:
    here = machine(tmp_path, {"proc/driver/nvidia/version": DRIVER})
    assert told(gpu_checks(here, lambda: [FULL])) == ("ok answers for 1 GPU, driver 570.86.15\nok H100, 80 GiB, GPU-1")
    assert told(gpu_checks(here, list)).startswith("warn answers, but gives no GPU")
    partly = replace(FULL, processes=None, power_watts=None)
    assert told(gpu_checks(here, lambda: [partly])).endswith("warn H100, 80 GiB, GPU-1: no power, processes")
    assert "warn H100, 80 GiB, without a uuid" in told(gpu_checks(here, lambda: [replace(FULL, uuid=None)]))


def test_no_nvml_is_well_where_there_is_no_gpu_and_fails_where_there_is_one(tmp_path: Path) -> None:
    assert told(gpu_checks(machine(tmp_path / "a"), unavailable)).startswith("ok no NVIDIA GPU here")
    driver = machine(tmp_path / "b", {"proc/driver/nvidia/version": DRIVER})
    assert told(gpu_checks(driver, unavailable)).startswith("fail an NVIDIA GPU is here, but libnvidia-ml.so.1 was not")
    device = machine(tmp_path / "c", {"dev/nvidia0": ""})
    assert told(gpu_checks(device, unavailable)).startswith("fail ")


def test_a_driver_that_is_stuck_fails_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "PATIENCE_SECONDS", 0.05)
    stuck = threading.Event()
    try:
        assert told(gpu_checks(machine(tmp_path), lambda: [FULL] if stuck.wait(20) else [])).startswith(
            "fail does not answer within 0.05 s"
        )
    finally:
        stuck.set()


@pytest.mark.debian
def test_nvml_itself_is_asked(tmp_path: Path, nvml_stub: Path, gpus: Path) -> None:
    program = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1]); from gpuwatch.doctor.hardware import gpu_checks;"
        "from gpuwatch.doctor.check import Machine; [print(c.state, c.said) for c in gpu_checks(Machine())]"
    )
    command = [sys.executable, "-c", program, str(nvml_stub)]
    done = subprocess.run(
        command, env=environment(NVMLSTUB_CONF=str(gpus)), capture_output=True, text=True, check=True, timeout=180
    )
    first, *each = done.stdout.splitlines()
    assert first.startswith("ok answers for 2 GPUs") and len(each) == 2 and "NVIDIA H100 80GB HBM3" in each[0]


# -- versions ---------------------------------------------------------------------------------------------------------

NEEDED = {"torch": (2, 2), "rich": (13,)}
GOOD = {"python": (3, 11, 4), "torch": (2, 13, 0), "rich": (14, 0)}


def about_versions(found: Mapping[str, tuple[int, ...]], **environment: str) -> str:
    return told(version_checks(environment, found, NEEDED))


def test_versions_that_go_together_are_named() -> None:
    assert about_versions(GOOD) == f"ok gpuwatch {__version__}, Python 3.11.4, torch 2.13.0, rich 14.0"
    assert "ok no torch in this Python" in about_versions({"python": (3, 12), "rich": (13, 1)})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"python": (3, 9)}, "fail Python 3.9 is too old"),
        ({"python": (3, 99)}, "warn Python 3.99 is newer than any tested"),
        ({"torch": (2, 1, 2)}, "fail torch 2.1.2 is too old"),
        ({"rich": (12, 9)}, "fail rich 12.9 is too old"),
        ({"pynvml": (11, 5)}, "warn the old distribution pynvml"),
        ({"gpuwatch": (0, 3)}, "warn another project's distribution"),
    ],
)
def test_versions_that_do_not_are_said(changed: Mapping[str, tuple[int, ...]], said: str) -> None:
    assert said in about_versions({**GOOD, **changed})
    assert "rich is not installed" in about_versions({"python": (3, 11), "torch": (2, 13)})


def test_a_pair_counts_only_with_the_environment_that_makes_it_bad() -> None:
    assert "crashes" in about_versions(GOOD, TORCH_DISTRIBUTED_DEBUG="detail")
    assert "crashes" not in about_versions(GOOD, TORCH_DISTRIBUTED_DEBUG="info")
    assert "crashes" not in about_versions({**GOOD, "torch": (2, 12, 0)}, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert "pynvml" not in about_versions({**GOOD, "pynvml": (13, 0)})
    assert len(BAD_PAIRS) == 3


def test_what_is_needed_is_what_the_package_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torch_gpuwatch-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: torch-gpuwatch\nVersion: 0.1.0\nRequires-Dist: psutil>=5.9\n"
        "Requires-Dist: torch>=2.2; extra == 'torch'\nRequires-Dist: grafanalib>=0.7.1; extra == 'render'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert needed_versions() == {"psutil": (5, 9), "torch": (2, 2)}
    assert versions.installed(["psutil", "nonesuch"]).keys() >= {"python", "psutil"}
    assert versions._numbers("2.13.0+cpu") == versions._numbers("2.13.0rc1") == (2, 13, 0)


# -- the kernel -------------------------------------------------------------------------------------------------------

BOOT = "11111111-2222-3333-4444-555555555555"


def boot_of(root: Path, **more: str) -> Machine:
    return machine(root, {"proc/sys/kernel/random/boot_id": BOOT + "\n", **more})


def snapshots(directory: Path, boot: str) -> list[Snapshot]:
    write_run(directory, "run", identity={"boot": boot})
    return read_all(directory)[0]


def test_records_of_this_boot_have_ages_that_mean_something(tmp_path: Path) -> None:
    here = boot_of(tmp_path)
    mine = snapshots(tmp_path / "mine", BOOT)
    assert told(clock_checks(here, mine, time.time())) == "ok monotonic, the same as the records'"
    assert told(clock_checks(here, snapshots(tmp_path / "none", ""), time.time())).startswith("ok ")
    assert told(clock_checks(here, snapshots(tmp_path / "old", "another"), time.time())).startswith(
        "warn 1 record of before the last boot: run"
    )
    assert told(clock_checks(here, mine, time.time() - 3600)).startswith("warn 1 record from the future: run")


def test_a_shifted_clock_is_noticed(tmp_path: Path) -> None:
    offsets = "monotonic         -5000         0\nboottime                0         0\n"
    shifted = boot_of(tmp_path / "a", **{"proc/self/timens_offsets": offsets})
    assert "shifts the monotonic clock by -5000 s" in told(clock_checks(shifted, [], time.time()))
    plain = boot_of(tmp_path / "b", **{"proc/self/timens_offsets": offsets.replace("-5000", "    0")})
    assert told(clock_checks(plain, [], time.time())).startswith("ok ")


@pytest.mark.parametrize(
    ("size", "free", "said"),
    [
        (32 << 30, 30 << 30, "ok "),
        (64 << 20, 64 << 20, "warn .*little for workers' batches"),
        (32 << 30, 1 << 30, "warn .*nearly full"),
        (0, 0, "ok "),
    ],
)
def test_shared_memory_is_large_enough_and_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, free: int, said: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=1))
    assert re.match(said, told(shared_memory_checks(machine(tmp_path))))


def test_no_shared_memory_is_a_warning(tmp_path: Path) -> None:
    here = machine(tmp_path)
    shutil.rmtree(tmp_path / "dev")
    assert re.match("warn .*No such file", told(shared_memory_checks(here)))


GROUP = {
    "proc/self/cgroup": "0::/job\n",
    "cgroups/job/memory.max": "1073741824\n",
    "cgroups/job/memory.current": "536870912\n",
    "cgroups/job/memory.events": "low 0\noom 0\noom_kill 0\n",
    "cgroups/job/cpu.max": "250000 100000\n",
    "cgroups/job/cpu.stat": "usage_usec 5\nnr_periods 100\nnr_throttled 1\n",
}


def test_limits_that_are_kept_are_named(tmp_path: Path) -> None:
    assert told(limit_checks(machine(tmp_path / "a", GROUP))) == "ok memory 512 MiB of 1 GiB, 2.5 cores"
    free = {**GROUP, "cgroups/job/memory.max": "max\n", "cgroups/job/cpu.max": "max 100000\n"}
    assert told(limit_checks(machine(tmp_path / "b", free))) == "ok memory 512 MiB of no limit, no limit of cores"
    assert told(limit_checks(machine(tmp_path / "c"))).startswith("ok no control group of version 2")


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    inside = {path.replace("/job/", "/"): text for path, text in GROUP.items()}
    assert told(limit_checks(machine(tmp_path, inside))).startswith("ok memory 512 MiB of 1 GiB")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("memory.current", "1073000000", "warn memory 1,023 MiB of 1 GiB"),
        ("memory.events", "oom 2\noom_kill 2\n", "the kernel has killed 2 processes in it"),
        ("memory.events", "oom 1\noom_kill 1\n", "the kernel has killed 1 process in it"),
        ("cpu.stat", "nr_periods 100\nnr_throttled 40\n", "held back by its quota in 40 % of periods"),
    ],
)
def test_limits_that_were_hit_are_said(tmp_path: Path, file: str, text: str, said: str) -> None:
    told_of = told(limit_checks(machine(tmp_path, {**GROUP, f"cgroups/job/{file}": text})))
    assert told_of.startswith("warn ") and said in told_of


MOUNTED = "proc /proc proc rw,nosuid,nodev,noexec,relatime 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "scope", "said"),
    [
        (MOUNTED, "0", "ok can be seen, and traced"),
        (MOUNTED, "1", "ok can be seen; `py-spy dump` of a run needs root"),
        (MOUNTED, "2", "warn ptrace_scope is 2: only root can take the stack"),
        (MOUNTED, "3", "warn ptrace_scope is 3: nobody can take the stack"),
        (
            MOUNTED.replace("relatime", "relatime,hidepid=invisible"),
            "0",
            "warn /proc is mounted with hidepid=invisible",
        ),
        (MOUNTED.replace("relatime", "hidepid=0"), "0", "ok "),
    ],
)
def test_processes_can_be_seen_and_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, scope: str, said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    files = {"proc/self/mounts": mounts, "proc/sys/kernel/yama/ptrace_scope": scope + "\n"}
    assert told(process_checks(machine(tmp_path, files))).startswith(said)
