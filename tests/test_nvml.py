from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pynvml
import pytest

from gpuwatch import sampler as sampling
from gpuwatch.advisor import advise_gpu
from gpuwatch.gpuseries import gpu_series
from gpuwatch.nvml import GpuReading, Nvml, NvmlUnavailable
from gpuwatch.sampler import STUCK, Sampler
from tests.serving import environment, eventually

pytestmark = [
    pytest.mark.debian,
    pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler"),
]


@pytest.fixture
def hardware(nvml_stub: Path, gpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two simulated GPUs in this process; append ``key=value`` lines to the file to change them."""
    ctypes.CDLL(str(nvml_stub))  # pynvml asks for the library by this one's SONAME, and gets it
    monkeypatch.setenv("NVMLSTUB_CONF", str(gpus))
    return gpus


@pytest.fixture
def nvml(hardware: Path) -> Iterator[Nvml]:
    opened = Nvml()
    yield opened
    opened.close()


def change(hardware: Path, *lines: str) -> None:
    with hardware.open("a") as file:
        file.write("\n".join(lines) + "\n")


def test_readings_come_in_base_units(nvml: Nvml) -> None:
    busy, idle = nvml.read()
    assert asdict(busy) == {
        "index": 0,
        "uuid": "GPU-00000000-0000-0000-0000-0000000000a0",
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": "00000000:07:00.0",
        "utilization_ratio": pytest.approx(0.97),
        "memory_used_bytes": 80530636800,
        "memory_reserved_bytes": 1073741824,
        "memory_total_bytes": 85899345920,
        "power_watts": pytest.approx(655.0),
        "power_limit_watts": pytest.approx(700.0),
        "energy_joules": pytest.approx(123456.789),
        "temperature_celsius": 71.0,
        "sm_clock_hertz": 1755e6,
        "sm_clock_max_hertz": 1980e6,
        "memory_busy_ratio": pytest.approx(0.61),
        "memory_clock_hertz": 2619e6,
        "power_default_limit_watts": pytest.approx(700.0),
        "clock_reasons": 4,
        "ecc_corrected": 3,
        "ecc_uncorrected": 0,
        "remapped_rows": (0, 0, 0, 0),
        "xids": (),
        "xid_at": None,
        "pcie_generation": 5,
        "pcie_generation_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_replays": 2,
        "pcie_sent_bytes": 5_000_000,
        "pcie_received_bytes": 9_000_000,
        "nvlink_sent_bytes": 2048 * 1024,
        "nvlink_received_bytes": 1024 * 1024,
        "processes": ((4242, 79456894976), (4343, 1073741824)),
        "foreign_processes": None,
    }
    assert idle.utilization_ratio == 0.0
    assert idle.processes == ()


def test_what_a_device_does_not_support_is_not_known(hardware: Path, nvml: Nvml) -> None:
    change(hardware, "gpu0.err.nvmlDeviceGetPowerUsage=3", "gpu0.err.nvmlDeviceGetComputeRunningProcesses_v3=4")
    busy, idle = nvml.read()
    assert (busy.power_watts, busy.processes) == (None, None)
    assert busy.utilization_ratio is not None
    assert idle.power_watts is not None
    assert idle.ecc_uncorrected is None


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("gpu0.power=4294967295", "power_watts"),
        ("gpu0.energy=18446744073709551615", "energy_joules"),
        ("gpu0.clock.1=4294967295", "sm_clock_hertz"),
        ("gpu0.mem.used=18446744073709551615", "memory_used_bytes"),
    ],
)
def test_a_sentinel_is_not_known(hardware: Path, nvml: Nvml, line: str, field: str) -> None:
    assert getattr(nvml.read()[0], field) is not None
    change(hardware, line)
    assert getattr(nvml.read()[0], field) is None


def test_errors_of_the_driver_are_counted_by_code_and_do_not_stick(hardware: Path, nvml: Nvml) -> None:
    assert nvml.read()[0].xids == ()
    for sequence, code in enumerate((79, 31, 79), 1):
        change(hardware, f"gpu0.xid={code}", f"xidseq={sequence}")
        nvml.read()
    busy, idle = nvml.read()
    assert busy.xids == ((31, 1), (79, 2))
    assert busy.xid_at is not None and abs(time.time() - busy.xid_at) < 30
    assert idle.xids == () and idle.xid_at is None


def test_errors_stay_unknown_where_nobody_may_listen(hardware: Path) -> None:
    change(hardware, "err.nvmlDeviceRegisterEvents=3")
    nvml = Nvml()
    assert [reading.xids for reading in nvml.read()] == [None, None]
    nvml.close()


def test_errors_are_still_counted_after_the_driver_came_back(hardware: Path, nvml: Nvml) -> None:
    nvml.read()
    change(hardware, "gpu0.xid=79", "xidseq=1")
    assert nvml.read()[0].xids == ((79, 1),)
    change(hardware, "err.nvmlDeviceGetCount_v2=1")
    with pytest.raises(NvmlUnavailable):
        nvml.read()
    change(hardware, "err.nvmlDeviceGetCount_v2=0")
    assert nvml.read()[0].xids == ((79, 1),)
    change(hardware, "xidseq=2")
    assert nvml.read()[0].xids == ((79, 2),)


def test_a_process_of_unknown_size_is_still_a_process(hardware: Path, nvml: Nvml) -> None:
    change(hardware, "gpu0.procs=77:18446744073709551615")
    assert nvml.read()[0].processes == ((77, None),)


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUtilizationRates"])
def test_a_lost_device_is_absent_and_the_other_stays(hardware: Path, nvml: Nvml, function: str) -> None:
    change(hardware, f"gpu0.err.{function}=15")
    assert [reading.index for reading in nvml.read()] == [1]
    change(hardware, f"gpu0.err.{function}=0")
    assert [reading.index for reading in nvml.read()] == [0, 1]


@pytest.mark.parametrize(
    ("function", "field", "number"),
    [
        ("nvmlDeviceGetTemperatureV", "temperature_celsius", 71.0),
        ("nvmlDeviceGetCurrentClocksEventReasons", "clock_reasons", 4),
        ("nvmlDeviceGetMemoryInfo_v2", "memory_total_bytes", 85899345920),
    ],
)
def test_a_library_without_the_new_function_is_asked_by_the_old_one(
    hardware: Path, nvml: Nvml, function: str, field: str, number: float
) -> None:
    change(hardware, f"err.{function}={pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}")
    assert getattr(nvml.read()[0], field) == number


def test_an_old_pynvml_without_the_new_functions_will_do(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, "nvmlDeviceGetTemperatureV")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: b"NVIDIA H100")
    busy = nvml.read()[0]
    assert (busy.temperature_celsius, busy.clock_reasons, busy.name) == (71.0, 4, "NVIDIA H100")


def test_the_driver_may_go_and_come_back(hardware: Path, nvml: Nvml) -> None:
    assert len(nvml.read()) == 2
    change(hardware, "err.nvmlDeviceGetCount_v2=1", "err.nvmlInitWithFlags=9")
    for expected in ("Uninitialized", "the NVIDIA driver is not loaded", "the NVIDIA driver is not loaded"):
        with pytest.raises(NvmlUnavailable, match=expected):
            nvml.read()
    change(hardware, "err.nvmlDeviceGetCount_v2=0", "err.nvmlInitWithFlags=0")
    assert len(nvml.read()) == 2


def test_without_the_library_there_is_one_clear_line() -> None:
    asked = subprocess.run(
        [sys.executable, "-W", "error", "-c", "from gpuwatch.nvml import Nvml; Nvml().read()"],
        env=environment(LD_LIBRARY_PATH=""),
        capture_output=True,
        text=True,
        check=False,
    )
    last = asked.stderr.splitlines()[-1]
    assert last.startswith(
        "gpuwatch.nvml.unavailable.NvmlUnavailable: no GPU telemetry: libnvidia-ml.so.1 was not found"
    )


def test_a_stuck_driver_holds_up_nobody_and_its_last_sample_goes_stale(
    hardware: Path, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "FRESH_SECONDS", 0.5)
    sampler = Sampler(nvml.read, period_seconds=0.02)
    sampler.start()
    eventually(lambda: sampler.latest() is not None)
    assert sampler.unavailable() is None
    change(hardware, "delay.nvmlDeviceGetPowerUsage=2000")
    eventually(lambda: sampler.latest() is None)
    began = time.monotonic()
    assert sampler.unavailable() == STUCK
    assert sampler.last_collected() is not None
    assert time.monotonic() - began < 1
    change(hardware, "delay.nvmlDeviceGetPowerUsage=0")
    eventually(lambda: sampler.latest() is not None)
    sampler.stop()
    sampler._thread.join()


def test_a_gpu_that_is_held_back_by_heat_under_load_is_found(hardware: Path, nvml: Nvml) -> None:
    change(hardware, "gpu0.reasons=0x40")
    sampler = Sampler(nvml.read, period_seconds=0.005)
    sampler.start()
    eventually(lambda: sampler.latest() is not None and sampler.history(nvml_reading(sampler, 0)))
    sampler.stop()
    sampler._thread.join()
    found, nothing = (advise_gpu(sampler.history(nvml_reading(sampler, index)), f"GPU {index}") for index in (0, 1))
    assert [(finding.rule, finding.where) for finding in found] == [("hw-thermal-throttle", "GPU 0")]
    assert "100 % of samples; 71 °C" in found[0].evidence
    assert nothing == []


def test_the_normal_power_cap_is_no_thermal_throttle(nvml: Nvml) -> None:
    numbers = {metric.name: number for metric, labels, number in gpu_series(nvml.read()[0]) if not labels}
    assert numbers["gpuwatch_gpu_thermal_throttle"] == 0.0


def nvml_reading(sampler: Sampler, index: int) -> GpuReading:
    sample = sampler.last_collected()
    assert sample is not None
    return sample.readings[index]
