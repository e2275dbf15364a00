"""The state of the allocator where the trace begins, worked out from the snapshot that ends it.

Two things are not written down and follow from the rules. A free event tells what was requested, not the size of the
block: in the large pool a remainder of up to 1 MiB is not split off, so the block may be that much larger. And an
expandable segment is listed by its mapped stretches, not by its address space.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuwatch.allocator.model import DEFAULT_POOL
from gpuwatch.allocator.settings import Settings
from gpuwatch.allocator.shapes import Action, DeviceRecord
from gpuwatch.allocator.sizes import LARGEST_SMALL, SMALL_SEGMENT, Rounding

ADDRESS_SPACE = 1 << 50
"""Of an expandable segment: the real one holds all of the device's memory and is never full."""

LARGEST_REGION = 1 << 39
"""An expandable segment spans 1 1/8 of the device's memory; what lies further apart is another one."""

Key = tuple[tuple[int, int], bool, int]
"""A kind of pool: private pool, small or large, stream."""


@dataclass(frozen=True)
class StartSegment:
    """A stretch of memory that the device had given when the trace begins."""

    address: int
    size: int
    key: Key
    expandable: bool


@dataclass
class StartBlock:
    """A block in use when the trace begins. ``size`` is exact, or the least it can be."""

    address: int
    size: int
    requested: int
    exact: bool
    stack: int
    freed_event: int | None = None
    room: int = 0
    """How much larger than ``size`` the block may be, when that is not exact."""


@dataclass
class Start:
    """The state where the trace begins."""

    segments: list[StartSegment] = field(default_factory=list)
    blocks: list[StartBlock] = field(default_factory=list)
    region_bases: dict[Key, int] = field(default_factory=dict)
    """Where the address space of an expandable segment begins, as far as the trace shows it."""
    inconsistencies: int = 0
    """Events that cannot have led to the snapshot; none in a whole trace."""
    inferred_blocks: int = 0
    """Blocks whose size was inferred from their neighbours."""

    @property
    def empty(self) -> bool:
        """The trace begins where the run does: nothing was reserved yet."""
        return not self.segments and not self.blocks


def rewind(device: DeviceRecord, settings: Settings) -> Start:
    """What a device held before the first event of its trace."""
    start = Start()
    born = _blocks(start, device, Rounding(settings))
    for segment in device.segments:
        for block in segment.blocks:
            if block.active and block.address not in born:
                requested = block.size if block.requested is None else block.requested
                start.blocks.append(StartBlock(block.address, block.size, requested, True, block.stack))
            start.inconsistencies += block.address in born and not block.active
    start.blocks.sort(key=lambda block: block.address)
    start.segments = sorted(_segments(start, device, settings), key=lambda segment: segment.address)
    if not settings.expandable_segments:
        _infer_sizes(start, device, settings)
    return start


def _blocks(start: Start, device: DeviceRecord, rounding: Rounding) -> set[int]:
    """Find the blocks that the trace frees and did not allocate; returns where those it allocated and kept are."""
    born: set[int] = set()
    trace = device.trace
    alloc, freed = int(Action.ALLOC), int(Action.FREE_COMPLETED)
    for index, (action, address) in enumerate(zip(trace.actions, trace.addresses, strict=True)):
        if action == alloc:
            born.add(address)
        elif action == freed:
            if address in born:
                born.discard(address)
            else:
                size = trace.sizes[index]
                start.blocks.append(StartBlock(address, rounding[size], size, False, trace.stacks[index], index))
    return born


def _segments(start: Start, device: DeviceRecord, settings: Settings) -> Iterator[StartSegment]:
    """Undo what the device gave and took during the trace, the last first."""
    plain: dict[int, StartSegment] = {}
    mapped = _Mapped(settings.large_segment_size)
    for segment in device.segments:
        key = (segment.pool_id, segment.small, segment.stream)
        if segment.expandable:
            mapped.add(key, segment.address, segment.size)
        else:
            plain[segment.address] = StartSegment(segment.address, segment.size, key, False)
    trace = device.trace
    changes = {
        int(action) for action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
    }
    indices = [index for index, action in enumerate(trace.actions) if action in changes]
    for index in reversed(indices):
        action, address, size, stream = (
            trace.actions[index],
            trace.addresses[index],
            trace.sizes[index],
            trace.streams[index],
        )
        pool_id = trace.pool_ids.get(index, DEFAULT_POOL)
        if action == Action.SEGMENT_ALLOC:
            if plain.pop(address, None) is None:
                start.inconsistencies += 1
        elif not size:
            start.inconsistencies += 1
        elif action == Action.SEGMENT_FREE:
            plain[address] = StartSegment(address, size, (pool_id, size == SMALL_SEGMENT, stream), False)
        elif action == Action.SEGMENT_MAP:
            mapped.remove(mapped.key(pool_id, address, size, stream), address, size)
        else:
            mapped.add(mapped.key(pool_id, address, size, stream), address, size)
    stretches = list(mapped.segments())
    for stretch in reversed(stretches):
        start.region_bases[stretch.key] = stretch.address
    for index in indices:
        action, address = trace.actions[index], trace.addresses[index]
        if action in (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP):
            key = mapped.key(trace.pool_ids.get(index, DEFAULT_POOL), address, trace.sizes[index], trace.streams[index])
            base = start.region_bases.get(key)
            if base is not None and base - LARGEST_REGION < address < base:
                start.region_bases[key] = address
    yield from plain.values()
    yield from stretches


class _Mapped:
    """Mapped stretches of expandable segments by kind of pool, as sorted lists that do not touch."""

    def __init__(self, large_page: int) -> None:
        self._large_page = large_page
        self._ranges: dict[Key, list[tuple[int, int]]] = {}

    def key(self, pool_id: tuple[int, int], address: int, size: int, stream: int) -> Key:
        """The kind of pool that an event of this address and size concerns."""
        small, large = (pool_id, True, stream), (pool_id, False, stream)
        if size == SMALL_SEGMENT or size % self._large_page:
            return small
        ranges = self._ranges.get(small, [])
        position = bisect_right(ranges, (address, 1 << 63)) - 1
        within = position >= 0 and ranges[position][0] <= address < ranges[position][1]
        return small if within and large not in self._ranges else large

    def add(self, key: Key, address: int, size: int) -> None:
        """These bytes are mapped."""
        ranges = self._ranges.setdefault(key, [])
        first, last = address, address + size
        position = bisect_left(ranges, (address, 0))
        if position and ranges[position - 1][1] >= first:
            position -= 1
        while position < len(ranges) and ranges[position][0] <= last:
            first, last = min(first, ranges[position][0]), max(last, ranges[position][1])
            del ranges[position]
        insort(ranges, (first, last))

    def remove(self, key: Key, address: int, size: int) -> None:
        """These bytes are not mapped."""
        ranges = self._ranges.setdefault(key, [])
        last = address + size
        position = max(bisect_right(ranges, (address, 1 << 63)) - 1, 0)
        while position < len(ranges) and ranges[position][0] < last:
            low, high = ranges[position]
            if high <= address:
                position += 1
                continue
            del ranges[position]
            pieces = [(low, address)] if low < address else []
            if high > last:
                pieces.append((last, high))
            ranges[position:position] = pieces
            position += len(pieces)

    def segments(self) -> Iterator[StartSegment]:
        """The stretches that are mapped."""
        for key, ranges in self._ranges.items():
            for first, last in ranges:
                yield StartSegment(first, last - first, key, True)


def _infer_sizes(start: Start, device: DeviceRecord, settings: Settings) -> None:
    """Give blocks of the large pool the unsplit remainder that what follows them shows."""
    large = [segment for segment in start.segments if not segment.key[1] and not segment.expandable]
    starts = [segment.address for segment in large]
    unsure: dict[int, tuple[StartBlock, int]] = {}
    for position, block in enumerate(start.blocks):
        found = bisect_right(starts, block.address) - 1
        if block.exact or found < 0 or block.address >= large[found].address + large[found].size:
            continue
        end = large[found].address + large[found].size
        following = start.blocks[position + 1].address if position + 1 < len(start.blocks) else end
        limit = settings.max_non_split_rounding if block.size >= settings.max_split_size else LARGEST_SMALL
        gap = min(following, end) - block.address - block.size
        if 0 < gap <= limit:  # no block of the large pool is as small
            block.size += gap
            block.exact = True
            start.inferred_blocks += 1
        elif gap > limit:
            unsure[block.address] = (block, limit)
            block.room = limit
    addresses = sorted(unsure)
    trace = device.trace
    for action, address in zip(trace.actions, trace.addresses, strict=True):
        if not unsure:
            break
        if action == Action.FREE_COMPLETED:
            unsure.pop(address, None)
        elif action == Action.ALLOC:
            position = bisect_left(addresses, address) - 1
            if position < 0 or addresses[position] not in unsure:
                continue
            block, limit = unsure[addresses[position]]
            remainder = address - block.address - block.size
            if 0 <= remainder <= limit:  # a request is always put at the start of a free block
                block.size += remainder
                block.exact, block.room = True, 0
                start.inferred_blocks += remainder > 0
                del unsure[block.address]
