"""What the GPUs say about themselves: the only file that calls NVML, through pynvml.

A reading that a device or a driver does not give is None. NVML says so in three ways, all taken care of here: an
error, a function that is missing, and a sentinel (all bits set).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

__all__ = ["GpuReading", "Nvml", "NvmlUnavailable"]

_SENTINELS = (2**32 - 1, 2**64 - 1)

_NO_NVML = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
)
"""Errors that concern every device: NVML has to be opened again."""

_NO_DEVICE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND)
"""Errors after which nothing that a device says can be believed."""


class NvmlUnavailable(RuntimeError):
    """No NVML at the moment; the text is one line that says why."""


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one time, in base units; None where it is not known.

    ``clock_reasons`` are NVML's bits for what holds the clock down, ``processes`` the compute processes as (pid, bytes
    or None), ``foreign_processes`` those that :mod:`gpuwatch.neighbours` says are strangers. ``memory_used_bytes``
    leaves the driver's own reservation out where the driver tells the two apart.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    clock_reasons: int | None = None
    ecc_uncorrected: int | None = None
    processes: tuple[tuple[int, int | None], ...] | None = None
    foreign_processes: tuple[tuple[int, int], ...] | None = None


class Nvml:
    """NVML, opened at the first read and again whenever the driver went away and came back. For one thread."""

    def __init__(self) -> None:
        self._opened = False

    def read(self) -> list[GpuReading]:
        """Every GPU that answers, by index. Raises NvmlUnavailable; the next call tries afresh."""
        try:
            if not self._opened:
                pynvml.nvmlInit()
                self._opened = True
            readings = [_device(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.close()
            raise NvmlUnavailable(_why(error)) from None
        return [reading for reading in readings if reading is not None]

    def close(self) -> None:
        """Give NVML up; the next read opens it again."""
        if self._opened:
            self._opened = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def _why(error: Any) -> str:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no GPU telemetry: libnvidia-ml.so.1 was not found, so no NVIDIA driver is installed here"
    if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "no GPU telemetry: the NVIDIA driver is not loaded"
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "no GPU telemetry: NVML and the loaded driver differ in version; restart the daemon after the update"
    return f"no GPU telemetry: NVML says {str(error)!r}"


def _device(index: int) -> GpuReading | None:
    """A device's reading, None when the device is lost; raises NVMLError only for what concerns all devices."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return _reading(index, handle)
    except pynvml.NVMLError as error:
        if error.value in _NO_NVML:
            raise
        return None


def _reading(index: int, handle: Any) -> GpuReading:
    used, reserved, total = _memory(handle)
    return GpuReading(
        index=index,
        uuid=_text(_ask("nvmlDeviceGetUUID", handle)),
        name=_text(_ask("nvmlDeviceGetName", handle)),
        pci_bus_id=_text(getattr(_ask("nvmlDeviceGetPciInfo", handle), "busId", None)),
        utilization_ratio=_scaled(getattr(_ask("nvmlDeviceGetUtilizationRates", handle), "gpu", None), 0.01),
        memory_used_bytes=used,
        memory_reserved_bytes=reserved,
        memory_total_bytes=total,
        power_watts=_scaled(_ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
        power_limit_watts=_scaled(_ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
        energy_joules=_scaled(_ask("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
        temperature_celsius=_scaled(_temperature(handle), 1.0),
        sm_clock_hertz=_scaled(_ask("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM), 1e6),
        sm_clock_max_hertz=_scaled(_ask("nvmlDeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_SM), 1e6),
        clock_reasons=_clock_reasons(handle),
        ecc_uncorrected=_known(
            _ask(
                "nvmlDeviceGetTotalEccErrors",
                handle,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,
            )
        ),
        processes=_processes(handle),
    )


def _ask(function: str, *arguments: Any) -> Any:
    """What NVML answers, None where it cannot; raises NVMLError for the loss of the device or of NVML."""
    call: Callable[..., Any] | None = getattr(pynvml, function, None)
    if call is None:
        return None  # an older pynvml
    try:
        return call(*arguments)
    except UnicodeDecodeError:
        return None
    except pynvml.NVMLError as error:
        if error.value in _NO_NVML or error.value in _NO_DEVICE:
            raise
        return None


def _memory(handle: Any) -> tuple[int | None, int | None, int | None]:
    """Used, reserved and all bytes; the old call counts what is reserved as used."""
    memory = _ask("nvmlDeviceGetMemoryInfo", handle, getattr(pynvml, "nvmlMemory_v2", None))
    if memory is None:
        memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    used, reserved, total = (_known(getattr(memory, field, None)) for field in ("used", "reserved", "total"))
    return used, reserved, total


def _temperature(handle: Any) -> Any:
    celsius = _ask("nvmlDeviceGetTemperatureV", handle, pynvml.NVML_TEMPERATURE_GPU)
    return _ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU) if celsius is None else celsius


def _clock_reasons(handle: Any) -> int | None:
    # Asked directly, never through pynvml's alias of the old name: whichever of the two the library has will answer.
    bits = _ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    return _known(_ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) if bits is None else bits)


def _processes(handle: Any) -> tuple[tuple[int, int | None], ...] | None:
    processes = _ask("nvmlDeviceGetComputeRunningProcesses", handle)
    if processes is None:
        return None
    return tuple((int(process.pid), _known(process.usedGpuMemory)) for process in processes)


def _known(number: Any) -> int | None:
    return None if number is None or int(number) in _SENTINELS else int(number)


def _scaled(number: Any, unit: float) -> float | None:
    known = _known(number)
    return None if known is None else known * unit


def _text(text: Any) -> str | None:
    """Text that is bytes or str, as the version of pynvml has it."""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text
