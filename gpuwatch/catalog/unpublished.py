"""What a record holds for the report alone: no alert and no panel reads it, and every series costs a fleet."""

from __future__ import annotations

from gpuwatch.catalog.loading import (
    LOADER_AFFORDABLE,
    LOADER_ALONE,
    LOADER_BATCH_SECONDS,
    LOADER_BEST_PREFETCH,
    LOADER_BEST_WAIT,
    LOADER_PINNING,
)
from gpuwatch.catalog.memory import CACHE_EMPTIED_RATE, CGROUP_OOM_KILLS, MACHINE_OOM_KILLS
from gpuwatch.catalog.ranks import TRAINING_CORES
from gpuwatch.catalog.timing import DEVICE_PHASE_SECONDS

UNPUBLISHED = frozenset(
    metric.name
    for metric in (
        LOADER_AFFORDABLE,
        LOADER_ALONE,
        LOADER_BATCH_SECONDS,
        LOADER_BEST_PREFETCH,
        LOADER_BEST_WAIT,
        LOADER_PINNING,
        CACHE_EMPTIED_RATE,
        CGROUP_OOM_KILLS,
        MACHINE_OOM_KILLS,
        TRAINING_CORES,
        DEVICE_PHASE_SECONDS,
    )
)
"""Names of these metrics. One that a rule or a panel comes to read has to leave this list (a test says so)."""
