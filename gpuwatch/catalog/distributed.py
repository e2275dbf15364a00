"""A rank among others: its own share of a step, what it exchanges with them, which devices the job leaves alone."""

from __future__ import annotations

from gpuwatch.catalog.naming import rank_metric

OWN_SECONDS = rank_metric(
    "own_seconds",
    "gauge",
    "seconds",
    "Usual time of a step (the mean of the middle half) that the rank spends on work of its own, by phase: waits for "
    "other ranks are left out.",
    "phase",
)
OWN_STEP_SECONDS = rank_metric("own_step_seconds", "gauge", "seconds", "The same over all phases that are known.")
DDP_SECONDS = rank_metric(
    "ddp_seconds",
    "gauge",
    "seconds",
    "What DistributedDataParallel measures of itself, where the rank waited little for others: communication, and its "
    "overlap with backward.",
    "part",
)
GRADIENT_SYNCS = rank_metric(
    "gradient_syncs_per_step", "gauge", "1", "Backward passes that reduce gradients across ranks, per optimizer step."
)
DDP_FIND_UNUSED = rank_metric(
    "ddp_find_unused_parameters", "gauge", "bool", "1 when DistributedDataParallel looks for unused parameters."
)
DDP_UNUSED_BYTES = rank_metric(
    "ddp_unused_parameter_bytes", "gauge", "bytes", "Most bytes of parameters that it found unused in a step."
)
COLLECTIVES = rank_metric(
    "collectives_total", "counter", "1", "Collectives of a process group, enqueued and completed.", "group", "state"
)
VISIBLE_GPUS = rank_metric("visible_gpus", "gauge", "1", "Accelerators that the process may use.")
USED_GPUS = rank_metric("used_gpus", "gauge", "1", "Accelerators that the process has allocated memory on.")
