"""A faithful small model of torch's native CUDA caching allocator: where a request goes, what becomes of a free block.

Sizes and addresses are integers in bytes. The model holds no memory; who drives it says where a new segment lies
(the trace, when a run is replayed; a counter, when a run is imagined).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from gpuwatch.allocator.blocks import ADDRESS_BITS, ADDRESS_MASK, FREE, LIVE, UNMAPPED, Block, Pool, Region
from gpuwatch.allocator.settings import UNLIMITED, Settings
from gpuwatch.allocator.sizes import LARGEST_SMALL, SMALL_SEGMENT, SMALLEST_BLOCK

DEFAULT_POOL = (0, 0)


class Allocator:
    """The state of one device's allocator, and its decisions under these settings.

    ``reserved`` counts the bytes got from the device, ``active`` those in blocks in use, ``releasable`` those that
    emptying the cache would give back. ``reserved - active - releasable`` is stranded.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.blocks: dict[int, Block] = {}
        self.pools: dict[tuple[tuple[int, int], bool, int], Pool] = {}
        self.reserved = self.active = self.releasable = 0
        self._plain = not settings.expandable_segments and settings.max_split_size == UNLIMITED
        self._has_regions = False

    @property
    def stranded(self) -> int:
        """Free bytes that no other pool or process can have: they share a segment with blocks in use."""
        return self.reserved - self.active - self.releasable

    def pool(self, identity: tuple[int, int], small: bool, stream: int) -> Pool:
        """The pool of this kind."""
        key = (identity, small, stream)
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = Pool(identity, small, stream)
        return pool

    # -- the two operations that matter for speed ---------------------------------------------------------------------

    def find(self, pool: Pool, size: int) -> Block | None:
        """The free block that a request for ``size`` bytes gets; None when new memory is needed. Changes nothing."""
        free = pool.free
        index = bisect_left(free, size << ADDRESS_BITS)
        if index == len(free):
            return None
        if self._plain and not self._has_regions:
            return self.blocks[free[index] & ADDRESS_MASK]
        return self._chosen(pool, size, index)

    def take(self, block: Block, size: int) -> None:
        """Put a request of ``size`` bytes into this free block, which is split when enough remains."""
        pool = block.pool
        free = pool.free
        del free[bisect_left(free, block.size << ADDRESS_BITS | block.address)]
        if block.region is not None:
            self.releasable -= block.region.whole_pages(block.address, block.size)[1]
        elif block.previous is None and block.next is None:
            self.releasable -= block.size
        self.place(block, size)

    def place(self, block: Block, size: int) -> None:
        """As :meth:`take`, for a block that is in no list of free blocks: a segment just got from the device."""
        pool = block.pool
        remaining = block.size - size
        if remaining >= SMALLEST_BLOCK and (
            remaining > LARGEST_SMALL and size < self.settings.max_split_size
            if not pool.small and not self.settings.expandable_segments
            else True
        ):
            rest = Block(block.address + size, remaining, pool, FREE, block.region)
            rest.previous = block
            following = rest.next = block.next
            if following is not None:
                following.previous = rest
            block.next = rest
            block.size = size
            self.blocks[rest.address] = rest
            insort(pool.free, remaining << ADDRESS_BITS | rest.address)
            if rest.region is not None:
                self.releasable += rest.region.whole_pages(rest.address, remaining)[1]
        block.use = LIVE
        self.active += block.size

    def release(self, block: Block) -> Block:
        """A block in use becomes free and joins its free neighbours; returns the block they make together."""
        self.active -= block.size
        block.use = FREE
        return self._insert(self._merged(block))

    # -- memory of the device -----------------------------------------------------------------------------------------

    def add_segment(self, address: int, size: int, pool: Pool) -> Block:
        """A segment got from the device: one block in no list; :meth:`place` or :meth:`shelve` it."""
        block = self.blocks[address] = Block(address, size, pool, FREE)
        self.reserved += size
        return block

    def shelve(self, block: Block) -> None:
        """List a free block that is in no list."""
        self._insert(block)

    def remove_segment(self, block: Block) -> None:
        """Give a segment that is one free block back to the device."""
        self.withdraw(block)
        del self.blocks[block.address]
        self.reserved -= block.size

    def release_cached(self) -> int:
        """Empty the cache: free segments and free whole pages go back to the device. Returns how many calls it took."""
        calls = 0
        for pool in sorted(self.pools.values(), key=lambda pool: pool.small):
            if pool.identity != DEFAULT_POOL:
                continue
            for key in tuple(pool.free):
                block = self.blocks[key & ADDRESS_MASK]
                if block.region is not None:
                    calls += self.unmap(block) > 0
                elif block.previous is None and block.next is None:
                    self.remove_segment(block)
                    calls += 1
        return calls

    def release_oversize(self, pool: Pool, size: int) -> int:
        """Before the cache is emptied: give back just enough blocks that are too big to be split."""
        limit = self.settings.max_split_size
        if limit == UNLIMITED:
            return 0
        wanted = max(size, limit)
        index = bisect_left(pool.free, wanted << ADDRESS_BITS)
        chosen = []
        if index < len(pool.free):
            chosen = [self.blocks[pool.free[index] & ADDRESS_MASK]]
        else:
            found = 0
            for key in reversed(pool.free):
                if found >= wanted or key >> ADDRESS_BITS < limit:
                    break
                found += key >> ADDRESS_BITS
                chosen.append(self.blocks[key & ADDRESS_MASK])
        whole = [block for block in chosen if block.region is None and block.previous is None and block.next is None]
        for block in whole:
            self.remove_segment(block)
        return len(whole)

    # -- expandable segments ------------------------------------------------------------------------------------------

    def add_region(self, address: int, size: int, page: int, pool: Pool) -> Block:
        """Address space for an expandable segment, nothing mapped yet."""
        block = self.blocks[address] = Block(address, size, pool, UNMAPPED, Region(address, page))
        insort(pool.unmapped, address)
        self._has_regions = True
        return block

    def room(self, pool: Pool, size: int) -> Block | None:
        """The lowest place where free blocks and unmapped space together hold ``size`` bytes; None: a new region."""
        for address in pool.unmapped:
            start: Block = self.blocks[address]
            if start.previous is not None and start.previous.use == FREE:
                start = start.previous
            found, block = 0, start
            following: Block | None = start
            while found < size and following is not None and following.use != LIVE:
                block = following
                found += block.size
                following = block.next
            if found >= size:
                return start
        return None

    def map(self, block: Block, size: int) -> Block:
        """Back unmapped space with memory, whole pages of at least ``size`` bytes; returns the free block it is in."""
        region, pool = block.region, block.pool
        assert region is not None and block.use == UNMAPPED
        mapped = min(-(-size // region.page) * region.page, block.size)
        del pool.unmapped[bisect_left(pool.unmapped, block.address)]
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, pool, UNMAPPED, region)
            self._link(block, rest, block.next)
            block.size = mapped
            self.blocks[rest.address] = rest
            insort(pool.unmapped, rest.address)
        block.use = FREE
        self.reserved += mapped
        return self._insert(self._merged(block))

    def unmap(self, block: Block) -> int:
        """Give the whole pages of a free block back to the device; returns their bytes."""
        region, pool = block.region, block.pool
        assert region is not None
        start, size = region.whole_pages(block.address, block.size)
        if not size:
            return 0
        self.withdraw(block)
        end = block.address + block.size
        if start > block.address:
            gone = Block(start, size, pool, UNMAPPED, region)
            self._link(block, gone, block.next)
            block.size = start - block.address
            self.blocks[start] = gone
            self._insert(block)
        else:
            gone = block
            gone.size = size
            gone.use = UNMAPPED
        if start + size < end:
            rest = Block(start + size, end - start - size, pool, FREE, region)
            self._link(gone, rest, gone.next)
            self.blocks[rest.address] = rest
            self._insert(rest)
        self.reserved -= size
        gone = self._join_unmapped(gone)
        if gone.previous is None and gone.next is None:  # the address space is given back too
            pool.unmapped.remove(gone.address)
            del self.blocks[gone.address]
        return size

    def segments(self) -> Iterator[list[Block]]:
        """The blocks of each stretch of memory, in address order within it."""
        for block in tuple(self.blocks.values()):
            if block.use != UNMAPPED and (block.previous is None or block.previous.use == UNMAPPED):
                run = []
                following: Block | None = block
                while following is not None and following.use != UNMAPPED:
                    run.append(following)
                    following = following.next
                yield run

    # -- within -------------------------------------------------------------------------------------------------------

    def _chosen(self, pool: Pool, size: int, index: int) -> Block | None:
        """The rules for expandable segments and for blocks too big to be split, which few runs have."""
        free, blocks, settings = pool.free, self.blocks, self.settings
        block = blocks[free[index] & ADDRESS_MASK]
        if block.region is not None:
            if settings.expandable_segments:
                # A block at the edge counts as large as it can grow: a smaller hole elsewhere is used up first.
                for key in free[index + 1 :]:
                    if block.region is None:
                        break
                    other = blocks[key & ADDRESS_MASK]
                    if _could_grow_to(other) >= _could_grow_to(block):
                        break
                    block = other
            else:
                later = (blocks[key & ADDRESS_MASK] for key in free[index + 1 :])
                plain = next((other for other in later if other.region is None), None)
                if plain is None:
                    return None
                block = plain
        limit = settings.max_split_size
        if size < limit <= block.size or (size >= limit and block.size >= size + settings.max_non_split_rounding):
            return None
        return block

    def _merged(self, block: Block) -> Block:
        """Join a block that is in no list with its free neighbours, which leave theirs."""
        following = block.next
        if following is not None and following.use == FREE:
            self.withdraw(following)
            del self.blocks[following.address]
            block.size += following.size
            after = block.next = following.next
            if after is not None:
                after.previous = block
        before = block.previous
        if before is not None and before.use == FREE:
            self.withdraw(before)
            del self.blocks[block.address]
            before.size += block.size
            after = before.next = block.next
            if after is not None:
                after.previous = before
            return before
        return block

    def _insert(self, block: Block) -> Block:
        insort(block.pool.free, block.size << ADDRESS_BITS | block.address)
        if block.region is not None:
            self.releasable += block.region.whole_pages(block.address, block.size)[1]
        elif block.previous is None and block.next is None:
            self.releasable += block.size
        return block

    def withdraw(self, block: Block) -> None:
        """Take a free block out of the list that it is in."""
        free = block.pool.free
        del free[bisect_left(free, block.size << ADDRESS_BITS | block.address)]
        if block.region is not None:
            self.releasable -= block.region.whole_pages(block.address, block.size)[1]
        elif block.previous is None and block.next is None:
            self.releasable -= block.size

    def _join_unmapped(self, block: Block) -> Block:
        unmapped, following, before = block.pool.unmapped, block.next, block.previous
        if following is not None and following.use == UNMAPPED:
            del unmapped[bisect_left(unmapped, following.address)]
            del self.blocks[following.address]
            block.size += following.size
            block.next = following.next
            if block.next is not None:
                block.next.previous = block
        if before is not None and before.use == UNMAPPED:
            del self.blocks[block.address]
            before.size += block.size
            before.next = block.next
            if before.next is not None:
                before.next.previous = before
            return before
        insort(unmapped, block.address)
        return block

    @staticmethod
    def _link(before: Block, block: Block, following: Block | None) -> None:
        before.next = block
        block.previous = before
        block.next = following
        if following is not None:
            following.previous = block


def _could_grow_to(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and following.use == UNMAPPED else 0)


def mappings(start: Block, size: int) -> list[tuple[int, int]]:
    """The address and bytes of what must be mapped, in order, for ``size`` bytes from the start of this block."""
    found, wanted = 0, []
    block: Block | None = start
    while found < size and block is not None:
        held = block.size
        if block.use == UNMAPPED:
            assert block.region is not None
            held = min(-(-(size - found) // block.region.page) * block.region.page, block.size)
            wanted.append((block.address, held))
        found += held
        block = block.next
    return wanted


def page_of(settings: Settings, small: bool) -> int:
    """Bytes of memory that an expandable segment grows by."""
    return SMALL_SEGMENT if small else settings.large_segment_size
