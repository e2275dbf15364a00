"""The fields of a report, as ``gpuwatch report --json`` prints them.

Times are in seconds, sizes in bytes, shares between 0 and 1. What is not known is None, never 0.
"""

from __future__ import annotations

from typing import TypedDict


class PhaseTime(TypedDict):
    """Time in a phase, and its share of all time in training steps."""

    seconds: float | None
    share: float | None


class TimePart(TypedDict):
    """Where the time went. Seconds of several ranks are their mean, ``step_seconds`` the slowest rank's."""

    steps: int
    batches: int | None
    seconds: float | None
    steps_per_second: float | None
    step_seconds: dict[str, float | None]
    phases: dict[str, PhaseTime]
    evaluation_seconds: float | None
    evaluation_forwards: int | None
    epoch_start_seconds: float | None
    epoch_starts: int | None
    between_seconds: float | None


class ModulePart(TypedDict):
    """Memory of the modules of one (folded) name. ``reached_bytes``: all that had been saved when they returned."""

    module: str
    modules: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    reached_bytes: int


class MemoryPart(TypedDict):
    """Memory in bytes; of several ranks the largest. ``modules`` is None where it was not measured."""

    host_resident_bytes: int | None
    host_peak_bytes: int | None
    host_in_use_bytes: int | None
    device_allocated_bytes: int | None
    device_active_peak_bytes: int | None
    device_reserved_bytes: int | None
    device_capacity_bytes: int | None
    alloc_retries: int | None
    ooms: int | None
    modules: list[ModulePart] | None


class WorkerPart(TypedDict):
    """A loader worker; shares of its time (busy, without a core) and of the time it makes batches (cpu, blocked)."""

    worker: int
    batches: int | None
    busy_share: float | None
    core_wait_share: float | None
    cpu_share: float | None
    blocked_share: float | None
    resident_bytes: int | None
    unique_bytes: int | None
    starts: int | None


class DataPart(TypedDict):
    """The data path; of several ranks, of the one that waits most for its data. ``parts_seconds`` are medians."""

    wait_share: float | None
    workers: int | None
    prefetch: int | None
    persistent_workers: bool | None
    recommended_workers: int | None
    recommended_prefetch: int | None
    recommended_wait_share: float | None
    needed_cores: float | None
    affordable_batch_seconds: float | None
    ready_share: float | None
    batch_items: float | None
    batch_bytes: int | None
    batch_seconds: dict[str, float | None]
    batch_cpu_seconds: float | None
    parts_seconds: dict[str, float | None]
    pinned: bool | None
    padding_share: float | None
    worker_deaths: int | None
    idle_workers: int | None
    copied_bytes: int | None
    shared_memory_used_bytes: int | None
    shared_memory_total_bytes: int | None
    worker_table: list[WorkerPart]


class RankPart(TypedDict):
    """One rank in short."""

    rank: int
    state: str
    cause: str | None
    pid: int
    steps: int
    steps_per_second: float | None
    step_seconds: dict[str, float | None]
    data_share: float | None
    host_peak_bytes: int | None
    device_active_peak_bytes: int | None
    record: str


class RunPart(TypedDict):
    """What ran, and how it ended."""

    name: str
    state: str
    cause: str | None
    started: str
    ended: str | None
    run_seconds: float
    steps: int
    world_size: int | None
    script: str | None
    python: str | None
    torch: str | None
    device: str | None
    record: str
    ranks: list[RankPart]


class Document(TypedDict):
    """A run: what ran, its time, its memory, its data path and its findings, most valuable first."""

    run: RunPart
    time: TimePart
    memory: MemoryPart
    data: DataPart
    findings: list[dict[str, object]]
