"""Setting the model right where the trace shows something else than it decided, so that the rest can be replayed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from gpuwatch.allocator.blocks import FREE, LIVE, UNMAPPED, Block, Pool
from gpuwatch.allocator.model import Allocator


def containing(model: Allocator, starts: list[int], address: int) -> Block | None:
    """The block that holds this address; ``starts`` are where segments begin, sorted."""
    block = model.blocks.get(address)
    if block is not None:
        return block
    low = bisect_right(starts, address)
    while low and (block := model.blocks.get(starts[low - 1])) is None:
        del starts[low - 1]  # the segment is gone
        low -= 1
    while block is not None and block.address + block.size <= address:
        block = block.next
    return block if block is not None and block.address <= address else None


def put(model: Allocator, starts: list[int], address: int, size: int, pool: Pool) -> Block:
    """Make the block at ``address`` be in use, whatever is there now."""
    while True:
        block = containing(model, starts, address)
        if block is None:
            clear(model, starts, address, size)
            insort(starts, address)
            block = model.add_segment(address, size, pool)
            model.place(block, size)
            return block
        if block.use == LIVE:
            model.release(block)
        elif block.use == UNMAPPED:
            return _map_and_put(model, block, address, size)
        else:
            break
    while block.address + block.size < address + size and block.next is not None and block.next.use == LIVE:
        block = model.release(block.next)
    room = block.address + block.size - address
    if block.address == address:
        model.take(block, min(size, room))
        return block
    model.withdraw(block)
    rest = Block(address, room, block.pool, FREE, block.region)
    _append(block, rest)
    block.size = address - block.address
    model.blocks[address] = rest
    model.shelve(block)
    model.shelve(rest)
    model.take(rest, min(size, room))
    return rest


def map_at(model: Allocator, starts: list[int], address: int, size: int, pool: Pool, space: int, page: int) -> None:
    """Map memory where the trace shows it."""
    block = containing(model, starts, address)
    if block is None:
        insort(starts, address)
        block = model.add_region(address, space, page, pool)
    if block.use != UNMAPPED:
        return
    if block.address < address:
        block = split_unmapped(model, block, address)
    model.map(block, min(size, block.size))


def unmap_at(model: Allocator, starts: list[int], address: int, size: int) -> bool:
    """Unmap memory where the trace shows it; returns whether the model would have unmapped just that."""
    block = containing(model, starts, address)
    if block is None or block.use != FREE or block.region is None:
        return False
    if block.region.whole_pages(block.address, block.size) == (address, size):
        model.unmap(block)
        return True
    end = min(address + size, block.address + block.size)
    if address > block.address:
        block = _split_free(model, block, address)
    if end < block.address + block.size:
        _split_free(model, block, end)
    model.unmap(block)
    return False


def remove_at(model: Allocator, starts: list[int], address: int, size: int) -> bool:
    """Remove a segment that the trace shows as freed; returns whether the model held it as freeable."""
    block = model.blocks.get(address)
    if block is None or block.region is not None:
        return False
    expected = block.use == FREE and block.size == size and block.previous is None and block.next is None
    if expected:
        model.remove_segment(block)
        return True
    forget(model, block)
    return False


def forget(model: Allocator, block: Block) -> None:
    """Drop the whole segment that a block is in."""
    while block.previous is not None:
        block = block.previous
    gone: Block | None = block
    while gone is not None:
        if gone.use == UNMAPPED:
            del gone.pool.unmapped[bisect_left(gone.pool.unmapped, gone.address)]
        else:
            model.reserved -= gone.size
            if gone.use == LIVE:
                model.active -= gone.size
            else:
                model.withdraw(gone)
        del model.blocks[gone.address]
        gone = gone.next


def clear(model: Allocator, starts: list[int], address: int, size: int) -> None:
    """Drop every segment that lies where the trace shows a new one; nothing lies there in a trace that is whole."""
    block = containing(model, starts, address)
    if block is not None and block.use != UNMAPPED:
        forget(model, block)
    position = bisect_left(starts, address)
    while position < len(starts) and starts[position] < address + size:
        found = model.blocks.get(starts[position])
        if found is not None:
            forget(model, found)
        del starts[position]


def grow_into(model: Allocator, block: Block, size: int) -> None:
    """Move the border between a block in use and the free one after it up by so many bytes."""
    free = block.next
    assert free is not None and free.use == FREE and free.size > size
    model.withdraw(free)
    del model.blocks[free.address]
    free.address += size
    free.size -= size
    model.blocks[free.address] = free
    model.shelve(free)
    block.size += size
    model.active += size


def split_unmapped(model: Allocator, block: Block, address: int) -> Block:
    """Cut unmapped space in two at this address; returns the upper part."""
    rest = Block(address, block.address + block.size - address, block.pool, UNMAPPED, block.region)
    _append(block, rest)
    block.size = address - block.address
    model.blocks[address] = rest
    insort(block.pool.unmapped, address)
    return rest


def _map_and_put(model: Allocator, block: Block, address: int, size: int) -> Block:
    region = block.region
    assert region is not None
    first = region.address + (address - region.address) // region.page * region.page
    if block.address < first:
        block = split_unmapped(model, block, first)
    block = model.map(block, min(address + size - first, block.size))
    if address > block.address:
        block = _split_free(model, block, address)
    model.take(block, min(size, block.size))
    return block


def _split_free(model: Allocator, block: Block, address: int) -> Block:
    model.withdraw(block)
    rest = Block(address, block.address + block.size - address, block.pool, FREE, block.region)
    _append(block, rest)
    block.size = address - block.address
    model.blocks[address] = rest
    model.shelve(block)
    model.shelve(rest)
    return rest


def _append(block: Block, rest: Block) -> None:
    rest.previous, rest.next = block, block.next
    if block.next is not None:
        block.next.previous = rest
    block.next = rest
