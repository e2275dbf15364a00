"""Memory of the training process and of its device."""

from __future__ import annotations

from gpuwatch.catalog.naming import rank_metric

HOST_RESIDENT = rank_metric("host_memory_resident_bytes", "gauge", "bytes", "Resident set of the training process.")
HOST_PEAK = rank_metric("host_memory_peak_bytes", "gauge", "bytes", "Largest resident set so far.")
HOST_IN_USE = rank_metric(
    "host_memory_in_use_bytes", "gauge", "bytes", "Bytes the C allocator has handed out (mallinfo2)."
)
DEVICE_ALLOCATED = rank_metric(
    "device_memory_allocated_bytes", "gauge", "bytes", "Bytes held by tensors on the accelerator."
)
DEVICE_ACTIVE_PEAK = rank_metric("device_memory_active_peak_bytes", "gauge", "bytes", "Largest active bytes so far.")
DEVICE_RESERVED = rank_metric("device_memory_reserved_bytes", "gauge", "bytes", "Bytes the caching allocator holds.")
DEVICE_CAPACITY = rank_metric(
    "device_memory_capacity_bytes", "gauge", "bytes", "Bytes this process may use on its device."
)
ALLOC_RETRIES = rank_metric("alloc_retries_total", "counter", "1", "Failed device allocations that flushed the cache.")
OOMS = rank_metric("ooms_total", "counter", "1", "Out-of-memory errors the allocator raised.")
DEVICE_ALLOCATED_PEAK = rank_metric(
    "device_memory_allocated_peak_bytes", "gauge", "bytes", "Largest bytes held by tensors so far."
)
DEVICE_ACTIVE = rank_metric(
    "device_memory_active_bytes", "gauge", "bytes", "Bytes of blocks in use, or waiting for another stream."
)
DEVICE_STEP_ACTIVE = rank_metric(
    "device_memory_step_active_bytes", "gauge", "bytes", "Largest active bytes at the start of recent backwards."
)
DEVICE_REQUESTED = rank_metric(
    "device_memory_requested_bytes", "gauge", "bytes", "Bytes that tensors asked for, unrounded."
)
DEVICE_INACTIVE_SPLIT = rank_metric(
    "device_memory_inactive_split_bytes", "gauge", "bytes", "Free bytes of segments that were split."
)
DEVICE_PRIVATE_POOLS = rank_metric(
    "device_memory_private_pool_bytes", "gauge", "bytes", "Bytes reserved by private pools (CUDA graphs), all together."
)
DEVICE_NOT_TORCH = rank_metric(
    "device_memory_not_torch_bytes", "gauge", "bytes", "Bytes in use on the device that this allocator did not reserve."
)
DEVICE_SEGMENTS = rank_metric("device_memory_segments", "gauge", "1", "Segments the caching allocator holds.")
DEVICE_DONE_EARLY = rank_metric(
    "device_done_early_ratio",
    "gauge",
    "ratio",
    "Share of looked-at steps whose work the device had done when they ended.",
)
DEVICE_CALLS = rank_metric(
    "device_memory_calls_total", "counter", "1", "Device allocations and frees the caching allocator made."
)
ALLOC_RETRY_RATE = rank_metric(
    "alloc_retries_per_step",
    "gauge",
    "1",
    "Cache flushes after a failed allocation, a step; the lesser of two windows.",
)
DEVICE_CALL_RATE = rank_metric(
    "device_memory_calls_per_step", "gauge", "1", "Device allocations and frees, a step; the lesser of two windows."
)
CACHE_EMPTIED_RATE = rank_metric(
    "cache_emptied_per_step", "gauge", "1", "Cache flushes that nothing forced, a step; the lesser of two windows."
)
HOST_PINNED = rank_metric("host_memory_pinned_bytes", "gauge", "bytes", "Bytes of torch's pool of pinned host memory.")
HOST_TOTAL = rank_metric(
    "host_memory_total_bytes", "gauge", "bytes", "Host memory there is: of the machine or its cgroup."
)
OPEN_DESCRIPTORS = rank_metric("open_descriptors", "gauge", "1", "File descriptors the training process holds open.")
MODEL_MEMORY = rank_metric(
    "model_memory_bytes", "gauge", "bytes", "Bytes of the watched models at the last look, by what they are.", "part"
)
MODULE_MEMORY = rank_metric(
    "module_memory_bytes",
    "gauge",
    "bytes",
    "Bytes of the ten largest kinds of modules, all their parts; the rest is _other.",
    "module",
)
HOST_AVAILABLE = rank_metric(
    "host_memory_available_bytes", "gauge", "bytes", "Host memory that is free to use: of the machine or its cgroup."
)
CGROUP_OOM_KILLS = rank_metric(
    "cgroup_oom_kills_total",
    "counter",
    "1",
    "Processes of the rank's control group that the kernel killed for memory, as the group counts them.",
)
MACHINE_OOM_KILLS = rank_metric(
    "machine_oom_kills_total", "counter", "1", "Processes of the machine that the kernel killed for memory."
)
DEVICE_FULL_SECONDS = rank_metric(
    "device_memory_full_seconds",
    "gauge",
    "seconds",
    "Time until the device is full if it goes on growing as it does; only where two windows in a row grew.",
)
OUT_OF_MEMORY = rank_metric(
    "rank_out_of_memory", "gauge", "bool", "1 when the rank ended because memory ran out, by kind.", "kind"
)
