"""A GPU's reading as series of the catalog."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwatch.catalog import (
    CLOCK_REASONS,
    GPU_CLOCK_REASON,
    GPU_ECC_CORRECTED,
    GPU_ECC_UNCORRECTED,
    GPU_ENERGY,
    GPU_FOREIGN_MEMORY,
    GPU_GRAVE_ERRORS,
    GPU_INFO,
    GPU_MEMORY_BUSY,
    GPU_MEMORY_CLOCK,
    GPU_MEMORY_RESERVED,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
    GPU_NVLINK_RECEIVED,
    GPU_NVLINK_SENT,
    GPU_PCIE_GENERATION,
    GPU_PCIE_GENERATION_MAX,
    GPU_PCIE_RECEIVED,
    GPU_PCIE_REPLAYS,
    GPU_PCIE_SENT,
    GPU_PCIE_WIDTH,
    GPU_PCIE_WIDTH_MAX,
    GPU_POWER,
    GPU_POWER_DEFAULT_LIMIT,
    GPU_POWER_LIMIT,
    GPU_PROCESSES,
    GPU_REMAP_FAILED,
    GPU_REMAP_PENDING,
    GPU_REMAPPED_ROWS,
    GPU_SM_CLOCK,
    GPU_SM_CLOCK_MAX,
    GPU_TEMPERATURE,
    GPU_THROTTLED,
    GPU_UTILIZATION,
    GPU_XID_ERRORS,
    GPU_XID_TIME,
    GRAVE_XIDS,
)
from gpuwatch.expr import Metric
from gpuwatch.nvml import GpuReading

THERMAL = CLOCK_REASONS["sw_thermal"] | CLOCK_REASONS["hw_thermal"] | CLOCK_REASONS["hw_power_brake"]
"""Clock reasons that are a fault of cooling or power; the normal power cap is none."""

MOST_XIDS = 16
"""Error codes of one GPU that are published: the label comes from the driver, and has to have an end."""


def gpu_series(reading: GpuReading) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    """A reading as (metric, values of the metric's own labels, number); what is not known is left out."""
    yield GPU_INFO, (reading.name or "", reading.pci_bus_id or ""), 1.0
    numbers = (
        (GPU_UTILIZATION, reading.utilization_ratio),
        (GPU_MEMORY_USED, reading.memory_used_bytes),
        (GPU_MEMORY_RESERVED, reading.memory_reserved_bytes),
        (GPU_MEMORY_TOTAL, reading.memory_total_bytes),
        (GPU_POWER, reading.power_watts),
        (GPU_POWER_LIMIT, reading.power_limit_watts),
        (GPU_ENERGY, reading.energy_joules),
        (GPU_TEMPERATURE, reading.temperature_celsius),
        (GPU_SM_CLOCK, reading.sm_clock_hertz),
        (GPU_SM_CLOCK_MAX, reading.sm_clock_max_hertz),
        (GPU_PROCESSES, None if reading.processes is None else len(reading.processes)),
        (GPU_FOREIGN_MEMORY, foreign_bytes(reading)),
        (GPU_MEMORY_BUSY, reading.memory_busy_ratio),
        (GPU_MEMORY_CLOCK, reading.memory_clock_hertz),
        (GPU_POWER_DEFAULT_LIMIT, reading.power_default_limit_watts),
        (GPU_ECC_CORRECTED, reading.ecc_corrected),
        (GPU_ECC_UNCORRECTED, reading.ecc_uncorrected),
        (GPU_XID_TIME, reading.xid_at),
        (GPU_PCIE_GENERATION, reading.pcie_generation),
        (GPU_PCIE_GENERATION_MAX, reading.pcie_generation_max),
        (GPU_PCIE_WIDTH, reading.pcie_width),
        (GPU_PCIE_WIDTH_MAX, reading.pcie_width_max),
        (GPU_PCIE_REPLAYS, reading.pcie_replays),
        (GPU_PCIE_SENT, reading.pcie_sent_bytes),
        (GPU_PCIE_RECEIVED, reading.pcie_received_bytes),
        (GPU_NVLINK_SENT, reading.nvlink_sent_bytes),
        (GPU_NVLINK_RECEIVED, reading.nvlink_received_bytes),
    )
    yield from ((metric, (), float(number)) for metric, number in numbers if number is not None)
    if reading.clock_reasons is not None:
        for reason, bit in CLOCK_REASONS.items():
            yield GPU_CLOCK_REASON, (reason,), float(bool(reading.clock_reasons & bit))
        yield GPU_THROTTLED, (), float(bool(reading.clock_reasons & THERMAL))
    if reading.remapped_rows is not None:
        corrected, uncorrected, pending, failed = reading.remapped_rows
        yield GPU_REMAPPED_ROWS, ("corrected",), float(corrected)
        yield GPU_REMAPPED_ROWS, ("uncorrected",), float(uncorrected)
        yield GPU_REMAP_PENDING, (), float(bool(pending))
        yield GPU_REMAP_FAILED, (), float(bool(failed))
    # Zero for the codes that matter most: a counter that appears at 1 has not risen, as far as Prometheus can tell.
    seen = {**dict.fromkeys(GRAVE_XIDS, 0), **dict(reading.xids)} if reading.xids is not None else {}
    if reading.xids is not None or reading.ecc_uncorrected is not None:
        codes = sum(count for code, count in reading.xids or () if code in GRAVE_XIDS)
        yield GPU_GRAVE_ERRORS, (), float(codes + (reading.ecc_uncorrected or 0))
    for code, count in sorted(seen.items())[:MOST_XIDS]:
        yield GPU_XID_ERRORS, (str(code),), float(count)


def foreign_bytes(reading: GpuReading) -> int | None:
    """Memory of processes that belong to no watched run; None where that cannot be told."""
    return None if reading.foreign_processes is None else sum(size for _, size in reading.foreign_processes)


def gpu_labels(reading: GpuReading) -> tuple[str, str]:
    """The values of the labels that identify a GPU: its index and its uuid."""
    return str(reading.index), reading.uuid or ""
