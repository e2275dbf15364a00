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
    """A run: what ran, its time, its memory and its findings, most valuable first."""

    run: RunPart
    time: TimePart
    memory: MemoryPart
    findings: list[dict[str, object]]
