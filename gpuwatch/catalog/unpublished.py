"""What a record holds for the report alone: no alert and no panel reads it, and every series costs a fleet."""

from __future__ import annotations

from gpuwatch.catalog.distributed import DDP_SECONDS
from gpuwatch.catalog.loading import (
    LOADER_AFFORDABLE,
    LOADER_ALONE,
    LOADER_BATCH_SECONDS,
    LOADER_BEST_PREFETCH,
    LOADER_BEST_WAIT,
    LOADER_PINNING,
    LOADER_SHARE,
    WORKER_RESIDENT,
)
from gpuwatch.catalog.memory import CACHE_EMPTIED_RATE, CGROUP_OOM_KILLS, HOST_PEAK, MACHINE_OOM_KILLS
from gpuwatch.catalog.ranks import RANK_START_TIME, TRAINING_CORES
from gpuwatch.catalog.timing import DEVICE_PHASE_SECONDS, WINDOW_STEP_SECONDS

UNPUBLISHED = frozenset(
    metric.name
    for metric in (
        LOADER_AFFORDABLE,
        LOADER_ALONE,
        LOADER_BATCH_SECONDS,
        LOADER_BEST_PREFETCH,
        LOADER_BEST_WAIT,
        LOADER_PINNING,
        LOADER_SHARE,
        WORKER_RESIDENT,
        CACHE_EMPTIED_RATE,
        CGROUP_OOM_KILLS,
        HOST_PEAK,
        MACHINE_OOM_KILLS,
        RANK_START_TIME,
        TRAINING_CORES,
        DEVICE_PHASE_SECONDS,
    )
)
"""Names of these metrics. One that a rule or a panel comes to read has to leave this list (a test says so)."""

UNPUBLISHED_PARTS = frozenset(
    {
        *((WINDOW_STEP_SECONDS.name, quantile) for quantile in ("0.9", "0.95")),
        # forward and backward are parts of a rank's own work
        *((DDP_SECONDS.name, part) for part in ("forward", "backward", "buffers")),
    }
)
"""The same for single series of a metric: its name, and the value of its own label."""
