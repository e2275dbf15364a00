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
GPU_ECC_UNCORRECTED = gpu_metric(
    "ecc_uncorrected_total", "counter", "1", "Uncorrected memory errors since the last reset."
)
