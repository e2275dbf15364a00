"""The exact replay: every event of a trace against the model, and how often the model was right.

The trace tells where new segments lie, when blocks are freed and when memory goes back to the device. The model tells
where each request goes and when a segment is needed. Where the two differ the model is set right by the trace.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from dataclasses import dataclass, field

from gpuwatch.allocator.blocks import LIVE, Block, Pool
from gpuwatch.allocator.correction import clear, grow_into, map_at, put, remove_at, unmap_at
from gpuwatch.allocator.model import DEFAULT_POOL, Allocator, mappings, page_of
from gpuwatch.allocator.rebuilding import build
from gpuwatch.allocator.rewind import ADDRESS_SPACE, Start, rewind
from gpuwatch.allocator.settings import Settings
from gpuwatch.allocator.shapes import Action, DeviceRecord
from gpuwatch.allocator.sizes import LARGEST_SMALL, SMALL_SEGMENT, SMALLEST_BLOCK, Rounding, segment_size

MOST_AT_ONCE = 8
"""New segments that wait for their request at one time: one, or one for each of a few threads."""

MOST_CORRECTIONS = 5_000
"""Past this many differences the trace does not follow the model; replaying on says nothing."""


@dataclass
class Fidelity:
    """How often the model decided what the trace shows."""

    events: int = 0
    allocations: int = 0
    address_matches: int = 0
    segment_allocations: int = 0
    segment_matches: int = 0
    first_mismatch: int | None = None
    """Index of the first event that differs."""

    def differs(self, index: int) -> None:
        """Note the event that differs."""
        if self.first_mismatch is None:
            self.first_mismatch = index


@dataclass
class Replay:
    """A trace replayed under the settings that it was recorded with. Sizes in bytes."""

    settings: Settings
    start: Start
    fidelity: Fidelity
    block_sizes: array[int]
    """For each event that allocates or frees, the size of the block; 0 for the others."""
    pool_ids: dict[int, tuple[int, int]]
    """Private pools of the allocations that went to one."""
    peak_reserved: int = 0
    peak_reserved_event: int = -1
    peak_active: int = 0
    peak_active_event: int = -1
    stranded_at_peak: int = 0
    device_allocations: int = 0
    device_frees: int = 0
    allocator: Allocator = field(default_factory=lambda: Allocator(Settings()))
    """The state where the trace ends."""
    first_failure: tuple[int, int] | None = None
    """The first request that failed: its event, and the bytes reserved then."""
    complete: bool = True
    """False when it was given up: the trace does not follow the model."""


def replay(device: DeviceRecord, settings: Settings) -> Replay:
    """Replay all events of a device."""
    start = rewind(device, settings)
    run: _Run | None = None
    try:
        run = _Run(device, settings, start)
        return run.run()
    except (KeyError, IndexError, AssertionError):
        # A trace can contradict itself in more ways than can be set right: memory in two places at once.
        if run is not None:
            run.outcome.complete = False
            return run.outcome
        sizes = array("Q", [0]) * len(device.trace)
        return Replay(settings, Start(), Fidelity(events=len(device.trace)), sizes, {}, complete=False)


class _Run:
    """One replay under way."""

    def __init__(self, device: DeviceRecord, settings: Settings, start: Start) -> None:
        self.trace = device.trace
        self.settings = settings
        self.model = build(start, settings)
        self.fidelity = Fidelity(events=len(device.trace))
        self.outcome = Replay(
            settings=settings,
            start=start,
            fidelity=self.fidelity,
            block_sizes=array("Q", [0]) * len(device.trace),
            pool_ids=dict(device.trace.pool_ids),
            peak_reserved=self.model.reserved,
            peak_active=self.model.active,
            stranded_at_peak=self.model.stranded,
            allocator=self.model,
        )
        self.starts = sorted({segment.address for segment in start.segments}.union(start.region_bases.values()))
        self.private = sorted(
            (segment.address, segment.address + segment.size, segment.pool_id)
            for segment in device.segments
            if segment.pool_id != DEFAULT_POOL
        )
        self.new_segments: dict[int, int] = {}
        """Segments of the trace that no request has been put into yet: address to size."""
        self.new_maps: list[tuple[int, int, int]] = []
        """Mappings of the trace that no request has been put into yet: address, size, stream."""
        self.unsure = {block.address: block for block in start.blocks if block.room}
        self.corrections = 0

    def run(self) -> Replay:
        """Replay to the end."""
        model, outcome, fidelity, trace = self.model, self.outcome, self.fidelity, self.trace
        rounding, blocks, block_sizes = Rounding(self.settings), model.blocks, outcome.block_sizes
        default_only = not self.private and not trace.pool_ids
        alloc, free_completed, free_requested = (
            int(Action.ALLOC),
            int(Action.FREE_COMPLETED),
            int(Action.FREE_REQUESTED),
        )
        find, take, release, pool_of = model.find, model.take, model.release, model.pool
        allocations = matches = 0
        columns = zip(trace.actions, trace.addresses, trace.sizes, trace.streams, strict=True)
        for index, (action, address, size, stream) in enumerate(columns):
            if action == alloc:
                allocations += 1
                size = rounding[size]
                identity = DEFAULT_POOL if default_only else self._pool_id(index, address)
                pool = pool_of(identity, size <= LARGEST_SMALL, stream)
                block = find(pool, size)
                if block is not None and block.address != address and self.unsure:
                    block = self._larger_before(index, block, address, size, pool)
                if block is not None and block.address == address and not self.new_maps:
                    matches += 1
                    take(block, size)
                elif self._new_memory(block, address, size, pool):
                    matches += 1
                    block = blocks[address]
                else:
                    fidelity.differs(index)
                    block = self._put(address, size, pool)
                block_sizes[index] = block.size
                if model.active > outcome.peak_active:
                    outcome.peak_active, outcome.peak_active_event = model.active, index
                if model.reserved > outcome.peak_reserved:
                    outcome.peak_reserved, outcome.peak_reserved_event = model.reserved, index
                    outcome.stranded_at_peak = model.stranded
            elif action == free_completed:
                block = blocks.get(address)
                if block is not None and block.use == LIVE:
                    block_sizes[index] = block.size
                    release(block)
            elif action != free_requested:
                self._device_event(index, action, address, size, stream)
                if model.reserved > outcome.peak_reserved:
                    outcome.peak_reserved, outcome.peak_reserved_event = model.reserved, index
                    outcome.stranded_at_peak = model.stranded
            if self.corrections > MOST_CORRECTIONS:
                outcome.complete = False
                break
        fidelity.allocations, fidelity.address_matches = allocations, matches
        self._shelve_unused()
        return outcome

    def _larger_before(self, index: int, block: Block | None, address: int, size: int, pool: Pool) -> Block | None:
        """The block found, once blocks from before the trace are as large as they must be for the trace to be so.

        The block found was too small for this request if the one before it, whose size the trace does not tell, holds
        an unsplit remainder. That size is a fact of the start which only this event shows.
        """
        while block is not None and block.address != address:
            before = block.previous
            start = self.unsure.get(before.address) if before is not None and before.use == LIVE else None
            excess = block.size - size + SMALLEST_BLOCK
            if before is None or start is None or start.freed_event is None or start.freed_event < index:
                break
            if excess > start.room:
                break
            start.room -= excess
            start.size += excess
            self.outcome.start.inferred_blocks += 1
            grow_into(self.model, before, excess)
            block = self.model.find(pool, size)
        return block

    # -- memory of the device -----------------------------------------------------------------------------------------

    def _new_memory(self, found: Block | None, address: int, size: int, pool: Pool) -> bool:
        """Whether the model, too, asks the device for just what the trace shows; then the request is in place."""
        if found is not None:
            return False
        if self.new_maps:
            return self._mapped(address, size, pool)
        new = self.new_segments.get(address)
        if new is None or self.settings.expandable_segments or new != segment_size(self.settings, size):
            return False
        self.fidelity.segment_matches += 1
        self.model.place(self._add_segment(address, pool), size)
        return True

    def _mapped(self, address: int, size: int, pool: Pool) -> bool:
        if not self.settings.expandable_segments:
            return False
        model, shown = self.model, [(first, length) for first, length, _ in self.new_maps]
        room = model.room(pool, size)
        if room is None:
            room = model.add_region(shown[0][0], ADDRESS_SPACE, page_of(self.settings, pool.small), pool)
            insort(self.starts, room.address)
        first = room.address
        if mappings(room, size) != shown or first != address:
            return False
        for start, length in shown:
            model.map(model.blocks[start], length)
        self.fidelity.segment_matches += len(shown)
        self.new_maps.clear()
        model.take(model.blocks[first], size)
        return True

    def _put(self, address: int, size: int, pool: Pool) -> Block:
        """The model was wrong: do what the trace shows."""
        self.corrections += 1
        self._apply_maps(pool)
        for first, length in tuple(self.new_segments.items()):
            if first <= address < first + length:
                self.model.shelve(self._add_segment(first, pool))
        return put(self.model, self.starts, address, size, pool)

    def _add_segment(self, address: int, pool: Pool) -> Block:
        size = self.new_segments.pop(address)
        clear(self.model, self.starts, address, size)
        insort(self.starts, address)
        return self.model.add_segment(address, size, pool)

    def _apply_maps(self, pool: Pool | None = None) -> None:
        for address, size, stream in self.new_maps:
            small = size == SMALL_SEGMENT
            target = pool or self.model.pool(DEFAULT_POOL, small, stream)
            page = page_of(self.settings, target.small)
            map_at(self.model, self.starts, address, size, target, ADDRESS_SPACE, page)
        self.new_maps.clear()

    def _device_event(self, index: int, action: int, address: int, size: int, stream: int) -> None:
        fidelity, outcome = self.fidelity, self.outcome
        if action == Action.SEGMENT_ALLOC or action == Action.SEGMENT_MAP:
            fidelity.segment_allocations += 1
            outcome.device_allocations += 1
            if action == Action.SEGMENT_MAP:
                self.new_maps.append((address, size, stream))
            elif size:
                self.new_segments[address] = size
                if len(self.new_segments) > MOST_AT_ONCE:
                    self._shelve(next(iter(self.new_segments)))
        elif action == Action.SEGMENT_FREE:
            outcome.device_frees += 1
            if self.new_segments.pop(address, None) is None and not remove_at(self.model, self.starts, address, size):
                self.corrections += 1
        elif action == Action.SEGMENT_UNMAP:
            outcome.device_frees += 1
            self._apply_maps()
            if not unmap_at(self.model, self.starts, address, size):
                self.corrections += 1
        elif action == Action.OOM:
            self._apply_maps()
            if outcome.first_failure is None:
                outcome.first_failure = (index, self.model.reserved)

    def _shelve_unused(self) -> None:
        self._apply_maps()
        for address in tuple(self.new_segments):
            self._shelve(address)

    def _shelve(self, address: int) -> None:
        """A new segment that no request was put into."""
        pool = self.model.pool(DEFAULT_POOL, self.new_segments[address] == SMALL_SEGMENT, 0)
        self.model.shelve(self._add_segment(address, pool))

    def _pool_id(self, index: int, address: int) -> tuple[int, int]:
        """The private pool of an allocation: named by the event, or that of the segment which holds it."""
        named = self.trace.pool_ids.get(index)
        if named is not None:
            return named
        position = bisect_right(self.private, (address, 1 << 64)) - 1
        if position >= 0 and address < self.private[position][1]:
            pool_id = self.private[position][2]
            self.outcome.pool_ids[index] = pool_id
            return pool_id
        return DEFAULT_POOL
