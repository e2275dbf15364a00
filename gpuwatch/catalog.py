"""Every metric gpuwatch publishes: a metric is a line here, and nowhere else.

Names follow Prometheus: base units in the name, ``_total`` on counters, identity in ``_info`` metrics. Readings of a
rank carry ``run`` and ``rank``, readings of a GPU ``gpu`` and ``uuid``; a metric's own labels come on top. A reading
that is not known is absent, never 0, NaN or a sentinel.
"""

from __future__ import annotations

from gpuwatch.expr import Metric

SCOPES = {"rank": ("run", "rank"), "gpu": ("gpu", "uuid"), "node": ()}
"""Which labels identify the owner of a reading."""

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Where a training step's time goes. ``other`` is what is left: loss, clipping, logging, user code."""

STEP_BOUNDS = (
    0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7,
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of the step-time histogram, in seconds; the last bucket is open."""

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations")
"""What a model's memory is: the last is what its forward saved for backward."""

CLOCK_REASONS = {
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "hw_slowdown": 0x08,
    "sw_power_cap": 0x04,
}
"""Why a GPU's clock is held down, and NVML's bit for it (nvml.h, ``nvmlClocksEventReason*``)."""


def _rank(name: str, kind: str, unit: str, help: str, *labels: str) -> Metric:
    return Metric(f"gpuwatch_{name}", kind, unit, help, "rank", labels)


def _gpu(name: str, kind: str, unit: str, help: str, *labels: str) -> Metric:
    return Metric(f"gpuwatch_gpu_{name}", kind, unit, help, "gpu", labels)


def _node(name: str, kind: str, unit: str, help: str, *labels: str) -> Metric:
    return Metric(f"gpuwatch_{name}", kind, unit, help, "node", labels)


# -- the run's time, written by the training process ------------------------------------------------------------------
STEPS = _rank("steps_total", "counter", "steps", "Training steps completed (optimizer steps, or batches without one).")
BATCHES = _rank("batches_total", "counter", "batches", "Batches the watched loaders delivered to training.")
PHASE_SECONDS = _rank(
    "phase_seconds_total", "counter", "seconds", "Time of training steps by phase, evaluation left out.", "phase"
)
STEP_SECONDS = _rank("step_seconds", "histogram", "seconds", "Duration of a training step, evaluation left out.")
EVALUATION_SECONDS = _rank("evaluation_seconds_total", "counter", "seconds", "Time in evaluation phases.")
EVALUATION_FORWARDS = _rank("evaluation_forwards_total", "counter", "1", "Forward passes in evaluation phases.")
BETWEEN_SECONDS = _rank(
    "between_seconds_total", "counter", "seconds", "Time between steps: set-up, checkpoints between epochs, user code."
)
EPOCH_STARTS = _rank("epoch_starts_total", "counter", "1", "Times a watched loader was started.")
EPOCH_START_SECONDS = _rank(
    "epoch_start_seconds_total", "counter", "seconds", "Wait for the first batch of an epoch, loader start included."
)
EPOCH_RESTARTS = _rank("epoch_restarts_total", "counter", "1", "Loader starts after a loader's first.")
EPOCH_RESTART_SECONDS = _rank(
    "epoch_restart_seconds_total", "counter", "seconds", "Wait for the first batch of every epoch but the first."
)
DEVICE_PHASE_SECONDS = _rank(
    "device_phase_seconds_total", "counter", "seconds", "Time of sampled steps by the accelerator's own clock.", "phase"
)

# -- what the run was set up with --------------------------------------------------------------------------------------
LOADER_WORKERS = _rank("loader_workers", "gauge", "workers", "Worker processes of the watched loader.")
LOADER_PERSISTENT = _rank("loader_persistent_workers", "gauge", "bool", "1 when workers outlive an epoch.")
LOADER_ITEM_SECONDS = _rank(
    "loader_item_seconds", "gauge", "seconds", "Median cost of one item of a batch loaded on the training thread."
)
WORKER_CPU_WAIT = _rank(
    "loader_worker_cpu_wait_ratio", "gauge", "ratio", "Share of its time a loader worker waited for a core."
)
CPU_BUDGET = _rank(
    "cpu_budget_cores", "gauge", "cores", "Cores this rank may use: affinity and cgroup quota over the node's ranks."
)
CPU_WAIT_SECONDS = _rank(
    "cpu_wait_seconds_total", "counter", "seconds", "Time the training thread was ready to run but had no core."
)

# -- the recent window, computed by the reader from the record's ring of steps -----------------------------------------
WINDOW_STEP_SECONDS = _rank(
    "window_step_seconds", "summary", "seconds", "Quantiles of recent untagged steps.", "quantile"
)
WINDOW_WAIT_SECONDS = _rank("window_data_wait_seconds", "gauge", "seconds", "Median recent wait for a batch.")
WINDOW_SLOW_RATIO = _rank(
    "window_slow_steps_ratio", "gauge", "ratio", "Share of recent untagged steps that are outliers (median and MAD)."
)
WINDOW_SLOW_EXCESS_SECONDS = _rank(
    "window_slow_excess_seconds", "gauge", "seconds", "Median time an outlier takes beyond a median step."
)
WINDOW_JITTER_RATIO = _rank("window_jitter_ratio", "gauge", "ratio", "Mean over median of recent untagged steps.")

# -- memory ------------------------------------------------------------------------------------------------------------
HOST_RESIDENT = _rank("host_memory_resident_bytes", "gauge", "bytes", "Resident set of the training process.")
HOST_PEAK = _rank("host_memory_peak_bytes", "gauge", "bytes", "Largest resident set so far.")
HOST_IN_USE = _rank("host_memory_in_use_bytes", "gauge", "bytes", "Bytes the C allocator has handed out (mallinfo2).")
DEVICE_ALLOCATED = _rank("device_memory_allocated_bytes", "gauge", "bytes", "Bytes held by tensors on the accelerator.")
DEVICE_ACTIVE_PEAK = _rank("device_memory_active_peak_bytes", "gauge", "bytes", "Largest active bytes so far.")
DEVICE_RESERVED = _rank("device_memory_reserved_bytes", "gauge", "bytes", "Bytes the caching allocator holds.")
DEVICE_CAPACITY = _rank("device_memory_capacity_bytes", "gauge", "bytes", "Bytes this process may use on its device.")
ALLOC_RETRIES = _rank("alloc_retries_total", "counter", "1", "Failed device allocations that flushed the cache.")
OOMS = _rank("ooms_total", "counter", "1", "Out-of-memory errors the allocator raised.")
DEVICE_ALLOCATED_PEAK = _rank(
    "device_memory_allocated_peak_bytes", "gauge", "bytes", "Largest bytes held by tensors so far."
)
DEVICE_ACTIVE = _rank(
    "device_memory_active_bytes", "gauge", "bytes", "Bytes of blocks in use, or waiting for another stream."
)
DEVICE_STEP_ACTIVE = _rank(
    "device_memory_step_active_bytes", "gauge", "bytes", "Largest active bytes at the start of recent backwards."
)
DEVICE_REQUESTED = _rank("device_memory_requested_bytes", "gauge", "bytes", "Bytes that tensors asked for, unrounded.")
DEVICE_INACTIVE_SPLIT = _rank(
    "device_memory_inactive_split_bytes", "gauge", "bytes", "Free bytes of segments that were split."
)
DEVICE_PRIVATE_POOLS = _rank(
    "device_memory_private_pool_bytes", "gauge", "bytes", "Bytes reserved by private pools (CUDA graphs), all together."
)
DEVICE_NOT_TORCH = _rank(
    "device_memory_not_torch_bytes", "gauge", "bytes", "Bytes in use on the device that this allocator did not reserve."
)
DEVICE_SEGMENTS = _rank("device_memory_segments", "gauge", "1", "Segments the caching allocator holds.")
DEVICE_DONE_EARLY = _rank(
    "device_done_early_ratio",
    "gauge",
    "ratio",
    "Share of looked-at steps whose work the device had done when they ended.",
)
DEVICE_CALLS = _rank(
    "device_memory_calls_total", "counter", "1", "Device allocations and frees the caching allocator made."
)
ALLOC_RETRY_RATE = _rank(
    "alloc_retries_per_step",
    "gauge",
    "1",
    "Cache flushes after a failed allocation, a step; the lesser of two windows.",
)
DEVICE_CALL_RATE = _rank(
    "device_memory_calls_per_step", "gauge", "1", "Device allocations and frees, a step; the lesser of two windows."
)
CACHE_EMPTIED_RATE = _rank(
    "cache_emptied_per_step", "gauge", "1", "Cache flushes that nothing forced, a step; the lesser of two windows."
)
HOST_PINNED = _rank("host_memory_pinned_bytes", "gauge", "bytes", "Bytes of torch's pool of pinned host memory.")
HOST_TOTAL = _rank("host_memory_total_bytes", "gauge", "bytes", "Host memory there is: of the machine or its cgroup.")
OPEN_DESCRIPTORS = _rank("open_descriptors", "gauge", "1", "File descriptors the training process holds open.")
MODEL_MEMORY = _rank(
    "model_memory_bytes", "gauge", "bytes", "Bytes of the watched models at the last look, by what they are.", "part"
)
MODULE_MEMORY = _rank(
    "module_memory_bytes",
    "gauge",
    "bytes",
    "Bytes of the ten largest kinds of modules; the rest is _other.",
    "module",
    "part",
)
LOADER_BATCH = _rank("loader_batch_items", "gauge", "items", "Items of a batch of the watched loader.")

# -- the interpreter ---------------------------------------------------------------------------------------------------
GC_PAUSES = _rank("gc_pauses_total", "counter", "1", "Full (oldest generation) garbage collections.")
GC_PAUSE_SECONDS = _rank("gc_pause_seconds_total", "counter", "seconds", "Time in full garbage collections.")
GC_ENABLED = _rank("gc_enabled", "gauge", "bool", "1 while automatic garbage collection is on.")
GC_LONGEST = _rank("gc_longest_pause_seconds", "gauge", "seconds", "The longest full collection so far.")

# -- findings ----------------------------------------------------------------------------------------------------------
OBSERVATION = _rank(
    "observation", "gauge", "1", "What a hook observed for a rule; the rule says in which unit.", "rule", "where"
)

# -- the rank itself ---------------------------------------------------------------------------------------------------
RANK_INFO = _rank(
    "rank_info", "info", "1", "Who the rank is.", "local_rank", "world_size", "pid", "restart", "script", "torch"
)
RANK_UP = _rank("rank_up", "gauge", "bool", "1 while the process holds its record's lease.")
RANK_ENDED = _rank("rank_ended", "gauge", "bool", "1 when the process wrote an end mark, by an exception too.")
RANK_EXIT_INFO = _rank("rank_exit_info", "info", "1", "How an ended rank ended.", "cause")
RANK_LAST_STEP = _rank("rank_last_step", "gauge", "steps", "The last completed step; stays after the process is gone.")
RANK_START_TIME = _rank("rank_start_time_seconds", "gauge", "seconds", "When the rank was attached, Unix time.")
RANK_STEP_AGE = _rank("rank_step_age_seconds", "gauge", "seconds", "Time since the last completed step.")
RANK_PROGRESS_AGE = _rank(
    "rank_progress_age_seconds", "gauge", "seconds", "Time since a hook last saw the run do anything."
)
GUARD_FAULTS = _rank(
    "guard_faults_total", "counter", "1", "Faults of gpuwatch's own hooks that were kept from the run.", "probe"
)

# -- GPUs, by NVML -----------------------------------------------------------------------------------------------------
GPU_INFO = _gpu("info", "info", "1", "Which GPU it is.", "name", "pci_bus_id")
GPU_UTILIZATION = _gpu("utilization_ratio", "gauge", "ratio", "Share of time any kernel ran: not how full the GPU was.")
GPU_MEMORY_USED = _gpu("memory_used_bytes", "gauge", "bytes", "Memory the driver has handed out.")
GPU_MEMORY_RESERVED = _gpu("memory_reserved_bytes", "gauge", "bytes", "Memory the driver keeps for itself.")
GPU_MEMORY_TOTAL = _gpu("memory_total_bytes", "gauge", "bytes", "Memory of the device.")
GPU_POWER = _gpu("power_watts", "gauge", "watts", "Power drawn.")
GPU_POWER_LIMIT = _gpu("power_limit_watts", "gauge", "watts", "Enforced power limit.")
GPU_ENERGY = _gpu("energy_joules_total", "counter", "joules", "Energy since the driver was loaded.")
GPU_TEMPERATURE = _gpu("temperature_celsius", "gauge", "celsius", "Temperature of the chip.")
GPU_SM_CLOCK = _gpu("sm_clock_hertz", "gauge", "hertz", "Clock of the multiprocessors.")
GPU_SM_CLOCK_MAX = _gpu("sm_clock_max_hertz", "gauge", "hertz", "Largest clock of the multiprocessors.")
GPU_CLOCK_REASON = _gpu("clock_event_reason", "gauge", "bool", "1 while this holds the clock down.", "reason")
GPU_THROTTLED = _gpu("thermal_throttle", "gauge", "bool", "1 while heat or a power brake holds the clock down.")
GPU_PROCESSES = _gpu("processes", "gauge", "processes", "Compute processes on the device.")
GPU_FOREIGN_MEMORY = _gpu(
    "foreign_memory_bytes", "gauge", "bytes", "Memory of processes that belong to no watched run; absent if unsure."
)
GPU_ECC_UNCORRECTED = _gpu("ecc_uncorrected_total", "counter", "1", "Uncorrected memory errors since the last reset.")

# -- the daemon itself -------------------------------------------------------------------------------------------------
BUILD_INFO = _node("build_info", "info", "1", "Version of the daemon.", "version")
SOURCE_UP = _node("source_up", "gauge", "bool", "1 when the source answered at the last collection.", "source")
SOURCE_SECONDS = _node("source_collect_seconds", "gauge", "seconds", "How long the last collection took.", "source")
SOURCE_TIME = _node(
    "source_last_collect_timestamp_seconds", "gauge", "seconds", "When the source last answered, Unix time.", "source"
)
RECORDS = _node("records", "gauge", "1", "Flight records read at the last collection.")
RECORDS_REJECTED = _node("records_rejected", "gauge", "1", "Files that are not valid records.", "reason")
SERIES_DROPPED = _node("series_dropped", "gauge", "1", "Series of records left out: unknown name, labels or too many.")

METRICS: dict[str, Metric] = {metric.name: metric for metric in list(globals().values()) if isinstance(metric, Metric)}
"""Every metric by name."""
