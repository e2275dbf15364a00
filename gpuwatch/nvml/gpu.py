"""One GPU at one time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one time, in base units; None where it is not known.

    ``clock_reasons`` are NVML's bits for what holds the clock down, ``processes`` the compute processes as (pid, bytes
    or None), ``foreign_processes`` those that :mod:`gpuwatch.neighbours` says are strangers. ``memory_used_bytes``
    leaves the driver's own reservation out where the driver tells the two apart. ``remapped_rows`` are rows remapped
    after (correctable, uncorrectable) errors, whether a remapping is pending and whether one failed. ``xids`` are the
    driver's error codes with how often each came since NVML was first opened, ``xid_at`` the Unix time of the last.
    Bytes of PCIe and NVLink are counters since the driver was loaded.
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
    memory_busy_ratio: float | None = None
    memory_clock_hertz: float | None = None
    power_default_limit_watts: float | None = None
    clock_reasons: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: tuple[int, int, int, int] | None = None
    xids: tuple[tuple[int, int], ...] | None = None
    xid_at: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    pcie_sent_bytes: int | None = None
    pcie_received_bytes: int | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    processes: tuple[tuple[int, int | None], ...] | None = None
    foreign_processes: tuple[tuple[int, int], ...] | None = None
