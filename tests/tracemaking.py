"""Runs that never were: random requests against the model, written down as torch writes its snapshots."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from gpuwatch.allocator.blocks import ADDRESS_BITS, ADDRESS_MASK, FREE, LIVE, UNMAPPED, Block
from gpuwatch.allocator.imagined import Imagined
from gpuwatch.allocator.model import Allocator
from gpuwatch.allocator.settings import Settings, parse
from gpuwatch.allocator.sizes import KIB, LARGEST_SMALL, MIB, rounded

Event = dict[str, object]


class RecordedAllocator(Allocator):
    """The model, writing down what it asks of the device in torch's words."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.events: list[Event] = []
        self.stack: list[dict[str, object]] = []

    def record(self, action: str, address: int, size: int, stream: int) -> None:
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": stream,
                "time_us": 1_700_000_000_000_000 + len(self.events),
                "frames": self.stack,
            }
        )

    def add_segment(self, address, size, pool):  # type: ignore[no-untyped-def]
        self.record("segment_alloc", address, size, pool.stream)
        return super().add_segment(address, size, pool)

    def remove_segment(self, block):  # type: ignore[no-untyped-def]
        self.record("segment_free", block.address, block.size, block.pool.stream)
        super().remove_segment(block)

    def map(self, block, size):  # type: ignore[no-untyped-def]
        address, before, stream = block.address, self.reserved, block.pool.stream
        merged = super().map(block, size)
        self.record("segment_map", address, self.reserved - before, stream)
        return merged

    def unmap(self, block):  # type: ignore[no-untyped-def]
        stream = block.pool.stream
        address, _ = block.region.whole_pages(block.address, block.size)
        size = super().unmap(block)
        if size:
            self.record("segment_unmap", address, size, stream)
        return size


@dataclass
class Run:
    """A run under way: requests go in, a snapshot comes out."""

    settings: Settings
    capacity: int | None = None
    live: dict[int, tuple[Block, int, object]] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = RecordedAllocator(self.settings)
        self.device = Imagined(self.model, self.capacity)
        self.device.device.next_address = 0x7F00_0000_0000

    def allocate(self, requested: int, stream: int = 0, line: int = 1) -> int | None:
        """Returns the address; None when the device is full, which is recorded as torch does."""
        self.model.stack = frames(line)
        block = self.device.allocate((0, 0), stream, rounded(self.settings, requested))
        if block is None:
            self.model.record("oom", 0, requested, stream)
            event = self.model.events[-1]
            del event["addr"]
            event["device_free"] = (self.capacity or 0) - self.model.reserved
            return None
        self.model.record("alloc", block.address, requested, stream)
        self.live[block.address] = (block, requested, self.model.stack)
        return block.address

    def free(self, address: int, *, later: bool = False) -> None:
        """Free a block; ``later``: another stream still uses it."""
        block, requested, stack = self.live[address]
        self.model.stack = stack  # type: ignore[assignment]
        self.model.record("free_requested", address, requested, block.pool.stream)
        if later:
            self.waiting.append(address)
        else:
            self.complete(address)

    def complete(self, address: int) -> None:
        """The other stream is done with a block."""
        block, requested, _ = self.live.pop(address)
        self.model.record("free_completed", address, requested, block.pool.stream)
        self.device.free(block)

    def snapshot(self, *, first: int = 0, stated: bool = True) -> dict[str, object]:
        """What torch would write now, the events before ``first`` overwritten."""
        content: dict[str, object] = {
            "segments": [segment(blocks, self) for blocks in self.model.segments()],
            "device_traces": [list(self.model.events[first:])],
        }
        if stated:
            content["allocator_settings"] = stated_settings(self.settings)
        return content


def frames(line: int) -> list[dict[str, object]]:
    """A stack that ends in this line of the user's."""
    return _FRAMES.setdefault(
        line,
        [
            {"name": "at::_ops::empty", "filename": "??", "line": 0},
            {"name": "_call_impl", "filename": "/env/site-packages/torch/nn/modules/module.py", "line": 1518},
            {"name": "forward", "filename": "/home/me/train.py", "line": line},
        ],
    )


_FRAMES: dict[int, list[dict[str, object]]] = {}


def segment(blocks: list[Block], run: Run) -> dict[str, object]:
    """A segment as torch lists it."""
    first = blocks[0]
    listed: list[dict[str, object]] = []
    for block in blocks:
        state = "inactive"
        if block.use == LIVE:
            state = "active_awaiting_free" if block.address in run.waiting else "active_allocated"
        requested, stack = run.live[block.address][1:] if block.use == LIVE else (0, [])
        listed.append(
            {"address": block.address, "size": block.size, "requested_size": requested, "state": state, "frames": stack}
        )
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in blocks),
        "stream": first.pool.stream,
        "segment_type": "small" if first.pool.small else "large",
        "segment_pool_id": first.pool.identity,
        "is_expandable": first.region is not None,
        "blocks": listed,
    }


def stated_settings(settings: Settings) -> dict[str, object]:
    """What torch says of its settings."""
    from gpuwatch.allocator.settings import UNLIMITED, conf_of

    split = settings.max_split_size
    return {
        "PYTORCH_CUDA_ALLOC_CONF": conf_of(settings),
        "max_split_size": -1 if split == UNLIMITED else split,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << index): number for index, number in enumerate(settings.roundup_power2_divisions)
        },
    }


def drawn_size(draw: random.Random) -> int:
    """A request as training makes them: many small, some odd, a few large."""
    kind = draw.random()
    if kind < 0.4:
        return draw.randrange(1, 64 * KIB)
    if kind < 0.6:
        return draw.randrange(1, LARGEST_SMALL + 1)
    if kind < 0.85:
        return draw.choice([2, 3, 4, 8, 9]) * MIB + draw.choice([0, 0, 512, 300 * KIB, 700 * KIB])
    return draw.randrange(1 * MIB, 90 * MIB)


def random_run(
    seed: int,
    conf: str = "",
    requests: int = 400,
    *,
    capacity: int | None = None,
    streams: tuple[int, ...] = (0,),
    size: Callable[[random.Random], int] = drawn_size,
) -> Run:
    """A run of random requests and frees, some frees waiting for another stream, the cache emptied now and then."""
    draw = random.Random(seed)
    run = Run(parse(conf), capacity)
    for number in range(requests):
        for address in [address for address in run.waiting if draw.random() < 0.3]:
            run.waiting.remove(address)
            run.complete(address)
        run.allocate(size(draw), draw.choice(streams), line=number % 7)
        while run.live and draw.random() < (0.48 if len(run.live) < 60 else 0.6):
            address = draw.choice(list(run.live))
            if address not in run.waiting:
                run.free(address, later=len(streams) > 1 and draw.random() < 0.3)
        if draw.random() < 0.01:
            run.model.stack = [{"name": "empty_cache", "filename": "/x/torch/cuda/memory.py", "line": 222}]
            run.device.empty_cache()
    return run


def check(model: Allocator) -> None:
    """Everything that must hold of a state."""
    ordered = sorted(model.blocks.values(), key=lambda block: block.address)
    for before, after in pairwise(ordered):
        assert before.address + before.size <= after.address, "blocks overlap"
    listed = {key & ADDRESS_MASK: key >> ADDRESS_BITS for pool in model.pools.values() for key in pool.free}
    unmapped = {address for pool in model.pools.values() for address in pool.unmapped}
    for block in ordered:
        assert block.size > 0
        if block.next is not None:
            assert block.next.previous is block and block.next.address == block.address + block.size
            assert (block.use, block.next.use) != (FREE, FREE), "free neighbours are not joined"
            assert (block.use, block.next.use) != (UNMAPPED, UNMAPPED)
        assert (listed.pop(block.address, None) == block.size) is (block.use == FREE)
        assert (block.address in unmapped) is (block.use == UNMAPPED)
    assert not listed
    assert all(pool.free == sorted(pool.free) for pool in model.pools.values())
    assert model.active == sum(block.size for block in ordered if block.use == LIVE)
    assert model.reserved == sum(block.size for block in ordered if block.use != UNMAPPED)
    free = sum(block.size for block in ordered if block.use == FREE)
    assert 0 <= model.releasable <= free and model.stranded == free - model.releasable >= 0
