"""An allocator that nobody recorded: the model with a device of its own, which has a given capacity."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from gpuwatch.allocator.blocks import ADDRESS_MASK, Block, Pool
from gpuwatch.allocator.model import DEFAULT_POOL, Allocator, mappings, page_of
from gpuwatch.allocator.rewind import ADDRESS_SPACE
from gpuwatch.allocator.sizes import LARGEST_SMALL, segment_size

FIRST_ADDRESS = 1 << 61
"""Above every address of a real device, so that a recorded state can be carried on."""

BETWEEN_SEGMENTS = 1 << 21


@dataclass
class Device:
    """What the device gives. ``capacity`` None: without end."""

    capacity: int | None = None
    next_address: int = FIRST_ADDRESS
    allocations: int = 0
    frees: int = 0
    retries: int = 0
    """Requests that first had to empty the cache, which waits for the device."""
    ages: dict[int, int] = field(default_factory=dict)
    """For the collector of old blocks: since which search a free block lies idle."""
    searches: int = 0


class Imagined:
    """Requests and frees against the model; the device is asked, the cache emptied and retried as torch does."""

    def __init__(self, model: Allocator, capacity: int | None = None) -> None:
        self.model = model
        self.device = Device(capacity)
        settings = model.settings
        self._limit = capacity
        self._collect_above: int | None = None
        if settings.memory_fraction is not None and capacity is not None:
            self._limit = int(capacity * settings.memory_fraction)
            if settings.garbage_collection_threshold:
                self._collect_above = int(self._limit * settings.garbage_collection_threshold)

    def allocate(self, identity: tuple[int, int], stream: int, size: int) -> Block | None:
        """Serve a request of a rounded size; None when the device has no room even for it alone."""
        model = self.model
        pool = model.pool(identity, size <= LARGEST_SMALL, stream)
        self.device.searches += 1
        block = model.find(pool, size)
        if block is not None:
            model.take(block, size)
            return block
        if self._collect_above is not None:
            self._collect(self._collect_above)
        block = self._grow(pool, size)
        if block is None:
            self.device.retries += 1
            freed = model.release_oversize(pool, size)
            self.device.frees += freed
            if freed:
                block = self._grow(pool, size)
            if block is None:
                self.empty_cache()
                block = self._grow(pool, size)
        return block

    def free(self, block: Block) -> None:
        """A block is no longer used by any stream."""
        merged = self.model.release(block)
        if self._collect_above is not None:
            self.device.ages[merged.address] = self.device.searches

    def empty_cache(self) -> None:
        """What ``torch.cuda.empty_cache()`` does."""
        self.device.frees += self.model.release_cached()

    def _grow(self, pool: Pool, size: int) -> Block | None:
        model, device = self.model, self.device
        if model.settings.expandable_segments:
            return self._grow_expandable(pool, size)
        wanted = segment_size(model.settings, size)
        if not self._fits(wanted):
            return None
        block = model.add_segment(device.next_address, wanted, pool)
        device.next_address += wanted + BETWEEN_SEGMENTS
        device.allocations += 1
        model.place(block, size)
        return block

    def _grow_expandable(self, pool: Pool, size: int) -> Block | None:
        model, device = self.model, self.device
        room = model.room(pool, size)
        if room is None:
            room = model.add_region(device.next_address, ADDRESS_SPACE, page_of(model.settings, pool.small), pool)
            device.next_address += ADDRESS_SPACE
        address = room.address
        for start, length in mappings(room, size):
            if not self._fits(length):
                return None
            model.map(model.blocks[start], length)
            device.allocations += 1
        block = model.blocks[address]
        model.take(block, size)
        return block

    def _fits(self, size: int) -> bool:
        return self._limit is None or self.model.reserved + size <= self._limit

    def _collect(self, above: int) -> None:
        """Free the older half of the idle segments, again and again, until the reserved bytes are below the limit."""
        model, device = self.model, self.device
        target = model.reserved - above
        if target <= 0:
            return
        idle: list[tuple[int, Block]] = []
        for pool in model.pools.values():
            if pool.small or pool.identity != DEFAULT_POOL:
                continue
            for key in pool.free:
                block = model.blocks[key & ADDRESS_MASK]
                if block.region is None and block.previous is None and block.next is None:
                    insort(idle, (device.searches - device.ages.get(block.address, 0), block), key=lambda pair: pair[0])
        reclaimed, freed = 0, True
        while idle and reclaimed < target and freed:
            mean = sum(age for age, _ in idle) / len(idle)
            old = [block for age, block in idle if age >= mean]
            idle = [(age, block) for age, block in idle if age < mean]
            freed = bool(old)
            for block in old:
                model.remove_segment(block)
                device.frees += 1
                reclaimed += block.size
