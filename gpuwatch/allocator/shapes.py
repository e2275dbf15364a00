"""A snapshot as the rest of the package sees it: checked, columns of integers, one record per device."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from gpuwatch.allocator.settings import Settings


class Action(IntEnum):
    """What the allocator did; ``OTHER`` is a snapshot, a user's mark or something newer than this program."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7
    OTHER = 8


ACTIONS = {action.name.lower(): int(action) for action in Action if action is not Action.OTHER}
NO_STACK = 0
"""Index of the stack of an event that has none."""


@dataclass(frozen=True)
class Owner:
    """Who asked for memory: the user's own source line where there is one, and what it was for."""

    line: str
    category: str


UNKNOWN_OWNER = Owner("(no stack recorded)", "unknown")
BEFORE_TRACE = Owner("(allocated before the trace begins)", "unknown")


@dataclass(frozen=True)
class Trace:
    """The events of one device in order, a column each. For ``OOM`` the address is what the device had free."""

    actions: bytearray = field(default_factory=bytearray)
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    streams: array[int] = field(default_factory=lambda: array("Q"))
    times_us: array[int] = field(default_factory=lambda: array("Q"))
    stacks: array[int] = field(default_factory=lambda: array("L"))
    pool_ids: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Events that name a private pool."""

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True)
class BlockRecord:
    """A block as the snapshot lists it. ``requested`` is None where the snapshot does not say."""

    address: int
    size: int
    requested: int | None
    active: bool
    allocated: bool
    stack: int


@dataclass(frozen=True)
class SegmentRecord:
    """A stretch of device memory as the snapshot lists it."""

    address: int
    size: int
    stream: int
    small: bool
    pool_id: tuple[int, int]
    expandable: bool
    blocks: tuple[BlockRecord, ...]


@dataclass(frozen=True)
class Mark:
    """The start or the end of a named range that the run recorded, such as an optimizer step."""

    time_us: int
    name: str
    start: bool


@dataclass(frozen=True)
class DeviceRecord:
    """One device: its memory at the time of the snapshot and what led there."""

    index: int
    segments: tuple[SegmentRecord, ...]
    trace: Trace
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot. ``owners`` is indexed by the stacks of events and blocks."""

    devices: tuple[DeviceRecord, ...]
    owners: tuple[Owner, ...]
    stated: Settings | None
    """What the snapshot says of the allocator's settings; None when it says nothing."""
    skipped_events: int = 0
    """Events and blocks that could not be understood and were left out."""
