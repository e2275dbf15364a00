"""The same requests under other settings: how much would have been reserved, and would it have fitted?

The recorded settings are replayed from the recorded state. Any other setting would have led to another state before
the trace began, which nobody knows: it starts from the blocks in use alone, and so do the recorded settings when the
two are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuwatch.allocator.blocks import Block
from gpuwatch.allocator.imagined import Imagined
from gpuwatch.allocator.model import DEFAULT_POOL, Allocator
from gpuwatch.allocator.owners import EMPTY_CACHE
from gpuwatch.allocator.rebuilding import build
from gpuwatch.allocator.replay import Replay
from gpuwatch.allocator.settings import Settings
from gpuwatch.allocator.shapes import NO_STACK, Action, DeviceRecord, Owner, Trace
from gpuwatch.allocator.sizes import Rounding

BEFORE_THE_TRACE = -1
"""Index of the event when the memory runs out before the first one."""


@dataclass(frozen=True)
class OutOfMemory:
    """Where a run would have ended. Sizes in bytes."""

    event: int
    requested: int
    owner: Owner
    reserved: int
    active: int


@dataclass(frozen=True)
class Outcome:
    """What the requests of a trace lead to under some settings. Sizes in bytes."""

    settings: Settings
    peak_reserved: int
    peak_active: int
    stranded: int
    """At the peak of what is reserved."""
    device_allocations: int
    device_frees: int
    retries: int
    out_of_memory: OutOfMemory | None


def imagine(
    device: DeviceRecord,
    replayed: Replay,
    settings: Settings,
    owners: tuple[Owner, ...],
    *,
    capacity: int | None = None,
    from_recorded_state: bool = False,
) -> Outcome:
    """Run the requests of a trace under these settings, on a device of this capacity."""
    rounding = Rounding(settings)
    model = build(replayed.start, settings) if from_recorded_state else Allocator(settings)
    run = Imagined(model, capacity)
    live: dict[int, Block] = {}
    ended: OutOfMemory | None = None
    if from_recorded_state:
        held = (block.address for block in replayed.start.blocks)
        live = {address: model.blocks[address] for address in held if address in model.blocks}
        if capacity is not None and model.reserved > capacity:
            run.empty_cache()
            if model.reserved > capacity:
                ended = OutOfMemory(BEFORE_THE_TRACE, 0, owners[NO_STACK], model.reserved, model.active)
    else:
        ended = _place_start(run, replayed, rounding, live, owners)
    run.device.allocations = run.device.frees = run.device.retries = 0
    peaks = _Peaks(model)
    if ended is None:
        ended = _requests(device.trace, replayed, run, rounding, live, owners, peaks)
    return Outcome(
        settings=settings,
        peak_reserved=peaks.reserved,
        peak_active=peaks.active,
        stranded=peaks.stranded,
        device_allocations=run.device.allocations,
        device_frees=run.device.frees,
        retries=run.device.retries,
        out_of_memory=ended,
    )


class _Peaks:
    __slots__ = ("active", "model", "reserved", "stranded")

    def __init__(self, model: Allocator) -> None:
        self.model = model
        self.reserved, self.active, self.stranded = model.reserved, model.active, model.stranded


def _place_start(
    run: Imagined, replayed: Replay, rounding: Rounding, live: dict[int, Block], owners: tuple[Owner, ...]
) -> OutOfMemory | None:
    """Put the blocks that were in use when the trace begins side by side, in the order of their addresses."""
    segments = iter(replayed.start.segments)
    segment = next(segments, None)
    for block in replayed.start.blocks:
        while segment is not None and segment.address + segment.size <= block.address:
            segment = next(segments, None)
        pool_id, _, stream = segment.key if segment is not None else (DEFAULT_POOL, False, 0)
        placed = run.allocate(pool_id, stream, rounding[block.requested])
        if placed is None:
            model = run.model
            return OutOfMemory(BEFORE_THE_TRACE, block.requested, owners[block.stack], model.reserved, model.active)
        live[block.address] = placed
    return None


def _requests(
    trace: Trace,
    replayed: Replay,
    run: Imagined,
    rounding: Rounding,
    live: dict[int, Block],
    owners: tuple[Owner, ...],
    peaks: _Peaks,
) -> OutOfMemory | None:
    model, pool_ids = run.model, replayed.pool_ids
    emptied = cache_emptied(trace, owners)
    alloc, freed, oom = int(Action.ALLOC), int(Action.FREE_COMPLETED), int(Action.OOM)
    columns = zip(trace.actions, trace.addresses, trace.sizes, trace.streams, strict=True)
    for index, (action, address, requested, stream) in enumerate(columns):
        if action in (alloc, oom):
            size = rounding[requested]
            block = run.allocate(pool_ids.get(index, DEFAULT_POOL), stream, size)
            if block is None:
                return OutOfMemory(index, requested, owners[trace.stacks[index]], model.reserved, model.active)
            if model.reserved > peaks.reserved:
                peaks.reserved, peaks.stranded = model.reserved, model.stranded
            if model.active > peaks.active:
                peaks.active = model.active
            if action == oom:
                run.free(block)
            else:
                live[address] = block
        elif action == freed:
            held = live.pop(address, None)
            if held is not None:
                run.free(held)
        elif index in emptied:
            run.empty_cache()
    return None


def cache_emptied(trace: Trace, owners: tuple[Owner, ...]) -> set[int]:
    """Events at which the program emptied the cache; memory that a request gave back to make room is left out."""
    found: set[int] = set()
    releases = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
    if not any(action in trace.actions for action in releases):
        return found
    index, end = 0, len(trace)
    while index < end:
        if trace.actions[index] not in releases:
            index += 1
            continue
        first = index
        while index < end and trace.actions[index] in (*releases, Action.FREE_COMPLETED):
            index += 1
        stack = trace.stacks[first]
        called = owners[stack].category == EMPTY_CACHE
        following = trace.actions[index] if index < end else None
        grows = following in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP, Action.OOM, Action.ALLOC)
        same = grows and stack != NO_STACK and trace.stacks[index] == stack
        if called or not (same or following == Action.OOM):
            found.add(first)
    return found


def outcome_under(
    device: DeviceRecord,
    replayed: Replay,
    settings: Settings,
    owners: tuple[Owner, ...],
    capacity: int | None,
    *,
    from_recorded_state: bool = False,
) -> Outcome:
    """As :func:`imagine` on a device without end; with a capacity, also whether (and where) that would have ended it.

    Where the run ends, the peak is still what it would have needed.
    """
    needs = imagine(device, replayed, settings, owners, from_recorded_state=from_recorded_state)
    if capacity is None or (needs.peak_reserved <= capacity and settings.memory_fraction is None):
        return needs
    limited = imagine(device, replayed, settings, owners, capacity=capacity, from_recorded_state=from_recorded_state)
    if limited.out_of_memory is None:
        return limited
    return replace(needs, out_of_memory=limited.out_of_memory, retries=limited.retries)


def capacity_at_failure(device: DeviceRecord, replayed: Replay) -> int | None:
    """What the process could have had when it ran out of memory: reserved and free bytes; None: it did not."""
    failure = replayed.first_failure
    if failure is None:
        return None
    event, reserved = failure
    return reserved + device.trace.addresses[event]
