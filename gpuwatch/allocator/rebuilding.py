"""From the state that a trace begins in to an allocator in that state."""

from __future__ import annotations

from bisect import bisect_left

from gpuwatch.allocator.blocks import FREE, LIVE, Block, Pool, Region
from gpuwatch.allocator.correction import split_unmapped
from gpuwatch.allocator.model import Allocator
from gpuwatch.allocator.rewind import ADDRESS_SPACE, LARGEST_REGION, Key, Start, StartBlock, StartSegment
from gpuwatch.allocator.settings import Settings
from gpuwatch.allocator.sizes import SMALL_SEGMENT


def build(start: Start, settings: Settings) -> Allocator:
    """An allocator in this state."""
    allocator = Allocator(settings)
    blocks = start.blocks
    addresses = [block.address for block in blocks]
    regions: dict[Key, tuple[Region, Block]] = {}
    covered = 0
    for segment in start.segments:
        if segment.address < covered:
            continue  # it overlaps the one before: an inconsistent trace
        covered = segment.address + segment.size
        pool = allocator.pool(*segment.key)
        first, last = bisect_left(addresses, segment.address), bisect_left(addresses, segment.address + segment.size)
        if segment.expandable:
            base = start.region_bases.get(segment.key, segment.address)
            _map_stretch(allocator, regions, segment, base, pool, blocks[first:last])
        else:
            _tile(allocator, allocator.add_segment(segment.address, segment.size, pool), blocks[first:last])
    return allocator


def _map_stretch(
    allocator: Allocator,
    regions: dict[Key, tuple[Region, Block]],
    segment: StartSegment,
    base: int,
    pool: Pool,
    blocks: list[StartBlock],
) -> None:
    page = SMALL_SEGMENT if segment.key[1] else allocator.settings.large_segment_size
    known = regions.get(segment.key)
    if known is not None and segment.address - known[0].address < LARGEST_REGION:
        tail = known[1]
    else:
        if known is not None or not 0 <= segment.address - base < LARGEST_REGION:
            base = segment.address
        tail = allocator.add_region(base, ADDRESS_SPACE, page, pool)
    if segment.address > tail.address:  # a stretch that is not mapped lies between
        tail = split_unmapped(allocator, tail, segment.address)
    block = allocator.map(tail, segment.size)
    region = block.region
    rest = block.next
    assert region is not None and rest is not None
    regions[segment.key] = (region, rest)
    allocator.withdraw(block)
    _tile(allocator, block, blocks)


def _tile(allocator: Allocator, whole: Block, blocks: list[StartBlock]) -> None:
    """Cut one free block that is in no list into these blocks in use and the free ones between."""
    after, end, cursor = whole.next, whole.address + whole.size, whole.address
    pieces: list[tuple[int, int, int]] = []
    for block in blocks:
        if block.address < cursor or block.address + block.size > end:
            continue  # it overlaps: an inconsistent trace
        if block.address > cursor:
            pieces.append((cursor, block.address - cursor, FREE))
        pieces.append((block.address, block.size, LIVE))
        cursor = block.address + block.size
    if cursor < end:
        pieces.append((cursor, end - cursor, FREE))
    before = whole.previous
    for address, size, use in pieces:
        piece = Block(address, size, whole.pool, use, whole.region)
        allocator.blocks[address] = piece
        piece.previous = before
        if before is not None:
            before.next = piece
        before = piece
    assert before is not None
    before.next = after
    if after is not None:
        after.previous = before
    for address, size, use in pieces:
        if use == FREE:
            allocator.shelve(allocator.blocks[address])
        else:
            allocator.active += size
