"""What one GPU says about itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pynvml

from gpuwatch.nvml.asking import ask, known, scaled, text
from gpuwatch.nvml.gpu import GpuReading
from gpuwatch.nvml.xids import Xids

_COUNTERS = {
    "pcie_sent_bytes": ("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 0, 1),
    "pcie_received_bytes": ("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 0, 1),
    "nvlink_sent_bytes": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", 2**32 - 1, 1024),
    "nvlink_received_bytes": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", 2**32 - 1, 1024),
}
"""Field values that count bytes: constant, scope (all links of NVLink together) and bytes of a unit (nvml.h)."""

_INTEGER_FIELDS = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
}


def read_device(index: int, handle: Any, xids: Xids) -> GpuReading:
    """All of one GPU; raises NVMLError for the loss of the device or of NVML."""
    uuid = text(ask("nvmlDeviceGetUUID", handle))
    seen, seen_at = xids.of(uuid)
    parts: dict[str, Any] = {**_links(handle), **_errors(handle)}
    return replace(_load(index, handle), uuid=uuid, xids=seen, xid_at=seen_at, **parts)


def _load(index: int, handle: Any) -> GpuReading:
    """What it is, and what it does now."""
    used, reserved, total = _memory(handle)
    rates = ask("nvmlDeviceGetUtilizationRates", handle)
    return GpuReading(
        index=index,
        name=text(ask("nvmlDeviceGetName", handle)),
        pci_bus_id=text(getattr(ask("nvmlDeviceGetPciInfo", handle), "busId", None)),
        utilization_ratio=scaled(getattr(rates, "gpu", None), 0.01),
        memory_busy_ratio=scaled(getattr(rates, "memory", None), 0.01),
        memory_used_bytes=used,
        memory_reserved_bytes=reserved,
        memory_total_bytes=total,
        power_watts=scaled(ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
        power_limit_watts=scaled(ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
        power_default_limit_watts=scaled(ask("nvmlDeviceGetPowerManagementDefaultLimit", handle), 1e-3),
        energy_joules=scaled(ask("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
        temperature_celsius=scaled(_temperature(handle), 1.0),
        sm_clock_hertz=scaled(ask("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM), 1e6),
        sm_clock_max_hertz=scaled(ask("nvmlDeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_SM), 1e6),
        memory_clock_hertz=scaled(ask("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_MEM), 1e6),
        clock_reasons=_clock_reasons(handle),
        processes=_processes(handle),
    )


def _errors(handle: Any) -> dict[str, Any]:
    """Memory errors since the last reset, and the rows remapped because of them."""
    remapped = ask("nvmlDeviceGetRemappedRows", handle)
    return {
        "ecc_corrected": _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "ecc_uncorrected": _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        "remapped_rows": None if remapped is None else tuple(int(number) for number in remapped),
    }


def _ecc(handle: Any, kind: int) -> int | None:
    return known(ask("nvmlDeviceGetTotalEccErrors", handle, kind, pynvml.NVML_VOLATILE_ECC))


def _links(handle: Any) -> dict[str, int | None]:
    """The ways to and from the device."""
    fields = _fields(handle)
    return {
        "pcie_generation": known(ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)),
        "pcie_generation_max": known(ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        "pcie_width": known(ask("nvmlDeviceGetCurrPcieLinkWidth", handle)),
        "pcie_width_max": known(ask("nvmlDeviceGetMaxPcieLinkWidth", handle)),
        "pcie_replays": known(ask("nvmlDeviceGetPcieReplayCounter", handle)),
        **fields,
    }


def _fields(handle: Any) -> dict[str, int | None]:
    """Byte counters, read in one call. ``nvmlDeviceGetPcieThroughput`` would take 20 ms for each direction."""
    wanted = {name: getattr(pynvml, constant, None) for name, (constant, _, _) in _COUNTERS.items()}
    asked = {name: field for name, field in wanted.items() if field is not None}
    values = ask("nvmlDeviceGetFieldValues", handle, [(asked[name], _COUNTERS[name][1]) for name in asked])
    read: dict[str, int | None] = {}
    for name, value in zip(asked, values or (), strict=False):
        if value.nvmlReturn == pynvml.NVML_SUCCESS and value.valueType in _INTEGER_FIELDS:
            number = known(getattr(value.value, _INTEGER_FIELDS[value.valueType]))
            read[name] = None if number is None else number * _COUNTERS[name][2]
    return read


def _memory(handle: Any) -> tuple[int | None, int | None, int | None]:
    """Used, reserved and all bytes; the old call counts what is reserved as used."""
    memory = ask("nvmlDeviceGetMemoryInfo", handle, getattr(pynvml, "nvmlMemory_v2", None))
    if memory is None:
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
    used, reserved, total = (known(getattr(memory, field, None)) for field in ("used", "reserved", "total"))
    return used, reserved, total


def _temperature(handle: Any) -> Any:
    celsius = ask("nvmlDeviceGetTemperatureV", handle, pynvml.NVML_TEMPERATURE_GPU)
    return ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU) if celsius is None else celsius


def _clock_reasons(handle: Any) -> int | None:
    # Asked directly, never through pynvml's alias of the old name: whichever of the two the library has will answer.
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    return known(ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) if bits is None else bits)


def _processes(handle: Any) -> tuple[tuple[int, int | None], ...] | None:
    processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
    if processes is None:
        return None
    return tuple((int(process.pid), known(process.usedGpuMemory)) for process in processes)
