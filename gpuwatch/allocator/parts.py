"""The fields of the documents that the commands print. A change to one has a line in the changelog."""

from __future__ import annotations

from typing import TypedDict


class TracePart(TypedDict):
    """How faithful the replay is."""

    events: int
    allocations: int
    address_matches: int
    segment_allocations: int
    segment_matches: int


class FailurePart(TypedDict):
    """Where memory runs out; event -1 is before the trace begins."""

    event: int
    line: str
    requested_bytes: int
    reserved_bytes: int
    active_bytes: int


class RecordedPart(TypedDict):
    """What the run did. ``rebuilt_…``: the same settings from the blocks in use alone, to compare others with."""

    conf: str
    device: int
    peak_reserved_bytes: int
    peak_active_bytes: int
    stranded_bytes: int
    device_allocations: int
    device_frees: int
    rebuilt_peak_reserved_bytes: int
    trace_is_whole: bool


class SettingPart(TypedDict):
    """What one setting leads to. ``fits`` is null without a capacity; ``modelled``: no real trace confirms it."""

    conf: str
    peak_reserved_bytes: int
    stranded_bytes: int
    device_allocations: int
    device_frees: int
    retries: int
    fits: bool | None
    out_of_memory: FailurePart | None
    modelled: bool


class RecommendedPart(TypedDict):
    """The one piece of advice; ``conf`` is null when no setting helps."""

    conf: str | None
    because: str
    peak_reserved_bytes: int
    instead_of_bytes: int
    modelled: bool


class ReplayDocument(TypedDict):
    """What ``gpuwatch replay --json`` prints."""

    trace: TracePart
    recorded: RecordedPart
    settings: list[SettingPart]
    recommended: RecommendedPart
    capacity_bytes: int | None
    capacity_from: str
    rules: str
    notes: list[str]


class OwnerPart(TypedDict):
    """Bytes of one source line."""

    line: str
    category: str
    bytes: int
    blocks: int


class MomentPart(TypedDict):
    """The memory at one time."""

    event: int
    time: str | None
    reserved_bytes: int
    active_bytes: int
    allocated_bytes: int
    requested_bytes: int
    owners: list[OwnerPart]
    categories: dict[str, int]


class HolePart(TypedDict):
    """Idle memory of one kind of pool."""

    pool: str
    stream: int
    expandable: bool
    segments: int
    reserved_bytes: int
    active_bytes: int
    stranded_bytes: int
    largest_hole_bytes: int


class KeptPart(TypedDict):
    """Blocks that were never freed."""

    line: str
    category: str
    bytes: int
    blocks: int
    bytes_per_step: int | None


class DevicePart(TypedDict):
    """One device's memory."""

    device: int
    trace: TracePart
    peak_reserved_bytes: int
    peak: MomentPart
    end: MomentPart
    holes: list[HolePart]
    steps: int
    kept: list[KeptPart]


class SnapshotDocument(TypedDict):
    """What ``gpuwatch snapshot --json`` prints."""

    rules: str
    devices: list[DevicePart]
    notes: list[str]
