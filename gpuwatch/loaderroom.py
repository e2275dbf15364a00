"""What the node has left for loader workers: cores, memory, shared memory. What is in use now stays possible."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwatch.catalog import (
    CPU_BUDGET,
    HOST_AVAILABLE,
    HOST_RESIDENT,
    LOADER_BATCH_BYTES,
    LOCAL_RANKS,
    SHARED_MEMORY_TOTAL,
    SHARED_MEMORY_USED,
    WORKER_UNIQUE,
)
from gpuwatch.delivery import Setting
from gpuwatch.sizing import Room

WORKERS_SHARE = 0.6
"""Of the memory that is free, what workers may take: they grow while they warm up."""

BATCHES_SHARE = 0.3
"""Of the memory that is free, what batches under way may take: shared memory is memory too."""

SHARED_MEMORY_SHARE = 0.5
"""Of the shared memory that is free, what batches under way may take."""

ANY_NUMBER = 1 << 20
"""More workers, or batches under way, than anybody has: where they are not limited."""


def room_left(values: Mapping[str, float], present: Setting) -> Room | None:
    """What the node has left for workers; what is in use now stays possible. None where it is not known."""
    cores = values.get(CPU_BUDGET.name)
    available = values.get(HOST_AVAILABLE.name)
    # A worker of which nothing is known yet shares its memory with the training process until it writes to it, and
    # then it can have as much as that.
    each = values.get(WORKER_UNIQUE.name) if present.workers else values.get(HOST_RESIDENT.name)
    size, total, used = (
        values.get(metric.name) for metric in (LOADER_BATCH_BYTES, SHARED_MEMORY_TOTAL, SHARED_MEMORY_USED)
    )
    if cores is None or available is None or each is None or size is None or total is None or used is None:
        return None
    if not sane(cores, available, each, size, total, used) or not 0 < cores <= ANY_NUMBER:
        return None
    ranks = min(max(1.0, values.get(LOCAL_RANKS.name, 1.0)), ANY_NUMBER)  # all of them go by the same advice
    fitting = _how_many(WORKERS_SHARE * available / ranks, each)
    under_way = _how_many(min(BATCHES_SHARE * available, SHARED_MEMORY_SHARE * max(0.0, total - used)) / ranks, size)
    return Room(
        cores=cores,
        workers=present.workers + fitting,
        batches=max(under_way, present.workers * present.prefetch),
    )


def _how_many(space: float, each: float) -> int:
    return int(min(ANY_NUMBER, space / each)) if each > 0 else ANY_NUMBER


def sane(*numbers: float) -> bool:
    """Whether these can be times, sizes or counts."""
    return all(0 <= number < 1e15 for number in numbers)
