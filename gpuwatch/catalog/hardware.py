"""GPUs, by NVML."""

from __future__ import annotations

from gpuwatch.catalog.naming import gpu_metric

GPU_INFO = gpu_metric("info", "info", "1", "Which GPU it is.", "name", "pci_bus_id")
GPU_UTILIZATION = gpu_metric(
    "utilization_ratio", "gauge", "ratio", "Share of time any kernel ran: not how full the GPU was."
)
GPU_MEMORY_USED = gpu_metric("memory_used_bytes", "gauge", "bytes", "Memory the driver has handed out.")
GPU_MEMORY_RESERVED = gpu_metric("memory_reserved_bytes", "gauge", "bytes", "Memory the driver keeps for itself.")
GPU_MEMORY_TOTAL = gpu_metric("memory_total_bytes", "gauge", "bytes", "Memory of the device.")
GPU_POWER = gpu_metric("power_watts", "gauge", "watts", "Power drawn.")
GPU_POWER_LIMIT = gpu_metric("power_limit_watts", "gauge", "watts", "Enforced power limit.")
GPU_ENERGY = gpu_metric("energy_joules_total", "counter", "joules", "Energy since the driver was loaded.")
GPU_TEMPERATURE = gpu_metric("temperature_celsius", "gauge", "celsius", "Temperature of the chip.")
GPU_SM_CLOCK = gpu_metric("sm_clock_hertz", "gauge", "hertz", "Clock of the multiprocessors.")
GPU_SM_CLOCK_MAX = gpu_metric("sm_clock_max_hertz", "gauge", "hertz", "Largest clock of the multiprocessors.")
GPU_CLOCK_REASON = gpu_metric("clock_event_reason", "gauge", "bool", "1 while this holds the clock down.", "reason")
GPU_THROTTLED = gpu_metric("thermal_throttle", "gauge", "bool", "1 while heat or a power brake holds the clock down.")
GPU_PROCESSES = gpu_metric("processes", "gauge", "processes", "Compute processes on the device.")
GPU_FOREIGN_MEMORY = gpu_metric(
    "foreign_memory_bytes", "gauge", "bytes", "Memory of processes that belong to no watched run; absent if unsure."
)
GPU_MEMORY_BUSY = gpu_metric(
    "memory_busy_ratio", "gauge", "ratio", "Share of time the device's memory was read or written."
)
GPU_MEMORY_CLOCK = gpu_metric("memory_clock_hertz", "gauge", "hertz", "Clock of the memory.")
GPU_POWER_DEFAULT_LIMIT = gpu_metric("power_default_limit_watts", "gauge", "watts", "Power limit it was built for.")
GPU_ECC_CORRECTED = gpu_metric("ecc_corrected_total", "counter", "1", "Corrected memory errors since the last reset.")
GPU_REMAPPED_ROWS = gpu_metric(
    "remapped_rows_total", "counter", "1", "Memory rows that were replaced, by the errors that called for it.", "cause"
)
GPU_REMAP_PENDING = gpu_metric("remap_pending", "gauge", "bool", "1 when a row is replaced at the next reset.")
GPU_REMAP_FAILED = gpu_metric("remap_failed", "gauge", "bool", "1 when a row could not be replaced.")
GPU_XID_ERRORS = gpu_metric(
    "xid_errors_total", "counter", "1", "Errors the driver reported since the daemon began to listen.", "xid"
)
GPU_GRAVE_ERRORS = gpu_metric(
    "grave_errors_total",
    "counter",
    "1",
    "Errors after which the device needs an operator: of its memory, or of a grave code.",
)
GPU_XID_TIME = gpu_metric(
    "xid_last_timestamp_seconds", "gauge", "seconds", "When the driver last reported an error, Unix time."
)
GPU_PCIE_GENERATION = gpu_metric("pcie_generation", "gauge", "1", "Generation the PCIe link runs at.")
GPU_PCIE_GENERATION_MAX = gpu_metric("pcie_generation_max", "gauge", "1", "Largest generation of device and slot.")
GPU_PCIE_WIDTH = gpu_metric("pcie_width_lanes", "gauge", "lanes", "Lanes the PCIe link uses.")
GPU_PCIE_WIDTH_MAX = gpu_metric("pcie_width_max_lanes", "gauge", "lanes", "Largest number of lanes.")
GPU_PCIE_REPLAYS = gpu_metric("pcie_replays_total", "counter", "1", "PCIe packets that had to be sent again.")
GPU_PCIE_SENT = gpu_metric("pcie_sent_bytes_total", "counter", "bytes", "Bytes the device sent over PCIe.")
GPU_PCIE_RECEIVED = gpu_metric("pcie_received_bytes_total", "counter", "bytes", "Bytes the device got over PCIe.")
GPU_NVLINK_SENT = gpu_metric("nvlink_sent_bytes_total", "counter", "bytes", "Bytes the device sent over NVLink.")
GPU_NVLINK_RECEIVED = gpu_metric("nvlink_received_bytes_total", "counter", "bytes", "Bytes the device got over NVLink.")
GPU_ECC_UNCORRECTED = gpu_metric(
    "ecc_uncorrected_total", "counter", "1", "Uncorrected memory errors since the last reset."
)
