"""What the allocator's state is made of: blocks that tile segments, and pools that list the free ones."""

from __future__ import annotations

from enum import IntEnum

ADDRESS_BITS = 72
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


class Use(IntEnum):
    """What a block is: free for reuse, in use (or waiting for another stream), or address space without memory."""

    FREE = 0
    LIVE = 1
    UNMAPPED = 2


FREE, LIVE, UNMAPPED = int(Use.FREE), int(Use.LIVE), int(Use.UNMAPPED)


class Region:
    """Address space of an expandable segment: memory is mapped into it page by page."""

    __slots__ = ("address", "page")

    def __init__(self, address: int, page: int) -> None:
        self.address = address
        self.page = page

    def whole_pages(self, address: int, size: int) -> tuple[int, int]:
        """First address and bytes of the pages that lie entirely in the range; (address, 0) when there is none."""
        offset = address - self.address
        begin = -(-offset // self.page) * self.page
        end = (offset + size) // self.page * self.page
        return (self.address + begin, end - begin) if begin < end else (address, 0)


class Pool:
    """The free blocks of one kind: one private pool or the default, small or large, one stream.

    ``free`` is sorted and holds ``size << 72 | address``: the best fit is a bisection, and integers compare fast.
    ``unmapped`` holds the addresses of mappable space, sorted.
    """

    __slots__ = ("free", "identity", "small", "stream", "unmapped")

    def __init__(self, identity: tuple[int, int], small: bool, stream: int) -> None:
        self.identity = identity
        self.small = small
        self.stream = stream
        self.free: list[int] = []
        self.unmapped: list[int] = []


class Block:
    """A piece of a segment. Neighbours in the segment are linked; no two free neighbours exist."""

    __slots__ = ("address", "next", "pool", "previous", "region", "size", "use")

    def __init__(self, address: int, size: int, pool: Pool, use: int, region: Region | None = None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.use = use
        self.region = region
        self.previous: Block | None = None
        self.next: Block | None = None
