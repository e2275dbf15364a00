"""How fast a trace is replayed, and how much memory that takes: a made-up training run, as long as asked for."""

from __future__ import annotations

import random
import time
import tracemalloc

from gpuwatch.allocator.blocks import Block
from gpuwatch.allocator.imagined import Imagined
from gpuwatch.allocator.model import Allocator
from gpuwatch.allocator.replay import replay
from gpuwatch.allocator.settings import Settings
from gpuwatch.allocator.shapes import Action, DeviceRecord, Trace
from gpuwatch.allocator.sizes import KIB, MIB, rounded

LAYERS = 48
LIVE_BLOCKS = 2_000


class _Recorded(Allocator):
    def __init__(self, trace: Trace) -> None:
        super().__init__(Settings())
        self.trace = trace

    def record(self, action: Action, address: int, size: int) -> None:
        """One event."""
        trace = self.trace
        trace.actions.append(action)
        trace.addresses.append(address)
        trace.sizes.append(size)
        for column in (trace.streams, trace.times_us, trace.stacks):
            column.append(0)

    def add_segment(self, address, size, pool):  # type: ignore[no-untyped-def]
        self.record(Action.SEGMENT_ALLOC, address, size)
        return super().add_segment(address, size, pool)


def training_trace(events: int, seed: int = 1) -> Trace:
    """Parameters that stay, then steps: activations of every layer forward, freed in the opposite order backward."""
    draw = random.Random(seed)
    trace = Trace()
    model = _Recorded(trace)
    run = Imagined(model)
    run.device.next_address = 1 << 40

    def allocate(requested: int) -> tuple[Block, int]:
        block = run.allocate((0, 0), 0, rounded(model.settings, requested))
        assert block is not None
        model.record(Action.ALLOC, block.address, requested)
        return block, requested

    def free(held: tuple[Block, int]) -> None:
        block, requested = held
        model.record(Action.FREE_REQUESTED, block.address, requested)
        model.record(Action.FREE_COMPLETED, block.address, requested)
        run.free(block)

    for _ in range(LIVE_BLOCKS):
        allocate(draw.choice([2 * KIB, 8 * KIB, 512 * KIB, 4 * MIB, 16 * MIB]))
    sizes = [draw.choice([300 * KIB, 3 * MIB, 5 * MIB, 12 * MIB, 24 * MIB]) for _ in range(LAYERS)]
    while len(trace) < events:
        kept = []
        length = draw.choice([1.0, 1.0, 0.9, 1.1])  # batches are not all as long
        for size in sizes:
            kept += [allocate(int(size * length)) for _ in range(4)]
            free(allocate(int(2 * size * length)))
        for held in reversed(kept):
            gradient = allocate(held[1])
            free(held)
            free(gradient)
    return trace


def replay_line(events: int) -> str:
    """Events a second on one core, and memory beside the trace itself."""
    trace = training_trace(events)
    device = DeviceRecord(0, (), trace)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        found = replay(device, Settings())
        seconds.append(time.perf_counter() - begun)
    matched = found.fidelity.address_matches == found.fidelity.allocations
    tracemalloc.start()
    replay(device, Settings())
    peak = tracemalloc.get_traced_memory()[1] - 8 * len(trace)
    tracemalloc.stop()
    return (
        f"replay: {len(trace):,} events, {len(trace) / min(seconds):,.0f} events/s on one core, "
        f"{peak / MIB:.1f} MiB beside the columns for {len(found.allocator.blocks):,} blocks, "
        f"{'every' if matched else 'NOT every'} address matched"
    )
