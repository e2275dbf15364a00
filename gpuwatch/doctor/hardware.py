"""The GPUs, by NVML."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from gpuwatch.doctor.check import Check, Machine, failure, warning, well
from gpuwatch.nvml import GpuReading, Nvml, NvmlUnavailable
from gpuwatch.report.wording import printable, said

NVML = "NVML"
PATIENCE_SECONDS = 10.0


def gpu_checks(machine: Machine, read: Callable[[], Sequence[GpuReading]] | None = None) -> Iterator[Check]:
    """Is NVML there, with which driver, and what does each GPU answer?"""
    answer = _in_time(read or Nvml().read)
    driver = _driver(machine)
    here = driver is not None or any(machine.devices.glob("nvidia[0-9]*"))
    if answer is None:
        yield failure(
            NVML,
            f"does not answer within {PATIENCE_SECONDS:g} s: the driver is stuck",
            "see `dmesg` for XID errors; reset the GPU or reboot",
        )
    elif isinstance(answer, NvmlUnavailable):
        reason = str(answer).removeprefix("no GPU telemetry: ")
        if here:
            yield failure(NVML, f"an NVIDIA GPU is here, but {reason}", _remedy(reason))
        else:
            yield well(NVML, f"no NVIDIA GPU here ({reason}); runs are watched without GPU telemetry")
    elif not answer:
        yield warning(NVML, "answers, but gives no GPU", "see `nvidia-smi`, and NVIDIA_VISIBLE_DEVICES in a container")
    else:
        yield well(NVML, f"answers for {len(answer)} GPU{'s'[: len(answer) > 1]}, driver {driver or 'not known'}")
        yield from (_gpu(reading) for reading in answer)


def _in_time(read: Callable[[], Sequence[GpuReading]]) -> Sequence[GpuReading] | NvmlUnavailable | None:
    answers: queue.SimpleQueue[Sequence[GpuReading] | NvmlUnavailable] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(read())
        except NvmlUnavailable as reason:
            answers.put(reason)

    # A daemon thread: one that is stuck in the driver must not keep the process from ending.
    threading.Thread(target=ask, name="gpuwatch-nvml", daemon=True).start()
    try:
        return answers.get(timeout=PATIENCE_SECONDS)
    except queue.Empty:
        return None


def _driver(machine: Machine) -> str | None:
    """The loaded kernel driver's version: what the library says of itself may be of another."""
    try:
        with open(machine.proc / "driver/nvidia/version", encoding="utf-8", errors="replace") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((printable(word) for word in words if word[0].isdigit() and "." in word), None)


def _remedy(reason: str) -> str:
    if "was not found" in reason:
        return (
            "give the daemon libnvidia-ml.so.1: NVIDIA_DRIVER_CAPABILITIES=utility in a container, else the driver's "
            "user-space package"
        )
    if "differ in version" in reason:
        return "reboot, or reload the driver's kernel module after its update; then restart the daemon"
    return "see `nvidia-smi` and `dmesg`"


def _gpu(reading: GpuReading) -> Check:
    about = f"GPU {reading.index}"
    unknown = [
        name
        for name, number in (
            ("utilization", reading.utilization_ratio),
            ("memory", reading.memory_total_bytes),
            ("power", reading.power_watts),
            ("temperature", reading.temperature_celsius),
            ("clocks", reading.sm_clock_hertz),
            ("processes", reading.processes),
        )
        if number is None
    ]
    size = said(reading.memory_total_bytes, "bytes")
    found = f"{printable(reading.name or 'unnamed')}, {size}, {printable(reading.uuid or 'without a uuid')}"
    if reading.uuid is None:
        return warning(about, found, "its metrics cannot be told from another node's by uuid; see `nvidia-smi -L`")
    if unknown:
        return warning(
            about,
            f"{found}: no {', '.join(unknown)}",
            "rules on these abstain; some are not to be had under MIG or vGPU",
        )
    return well(about, found)
