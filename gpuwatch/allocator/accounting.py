"""Whose bytes a device's memory holds, at the peak and at the end, and what lies idle between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuwatch.allocator.replay import Replay
from gpuwatch.allocator.rewind import LARGEST_REGION
from gpuwatch.allocator.settings import Settings
from gpuwatch.allocator.shapes import BEFORE_TRACE, NO_STACK, Action, DeviceRecord, Owner, SegmentRecord
from gpuwatch.allocator.sizes import SMALL_SEGMENT

SAMPLES = 240
"""Points of the picture over time."""


@dataclass(frozen=True)
class Share:
    """The bytes of one owner at one time."""

    owner: Owner
    size: int
    blocks: int


@dataclass(frozen=True)
class Moment:
    """The memory after an event; ``event`` -1 is before the first. Sizes in bytes."""

    event: int
    time_us: int | None
    reserved: int
    active: int
    allocated: int
    requested: int
    owners: tuple[Share, ...]


@dataclass(frozen=True)
class Hole:
    """Idle memory of one kind: pool, stream, expandable or not. Sizes in bytes."""

    pool: str
    stream: int
    expandable: bool
    segments: int
    reserved: int
    active: int
    stranded: int
    """Idle bytes that emptying the cache would not give back."""
    largest_hole: int


@dataclass(frozen=True)
class Timeline:
    """Bytes by owner at some events: ``sizes[sample][position of the owner]``."""

    events: tuple[int, ...]
    times_us: tuple[int, ...]
    owners: tuple[Owner, ...]
    sizes: tuple[tuple[int, ...], ...]
    reserved: tuple[int, ...]


@dataclass(frozen=True)
class Account:
    """A device's memory explained."""

    peak: Moment
    end: Moment
    peak_reserved: int
    holes: tuple[Hole, ...]
    timeline: Timeline


def account(device: DeviceRecord, replayed: Replay, owners: tuple[Owner, ...]) -> Account:
    """Follow every byte of a device through its trace."""
    ledger = _Ledger(device, replayed, owners)
    return ledger.run()


class _Ledger:
    """Bytes by owner while the events go by."""

    def __init__(self, device: DeviceRecord, replayed: Replay, owners: tuple[Owner, ...]) -> None:
        self.device, self.replayed = device, replayed
        self.owners = (*owners, BEFORE_TRACE)
        self.sizes = [0] * len(self.owners)
        self.counts = [0] * len(self.owners)
        self.active = self.allocated = self.requested = 0
        self.reserved = sum(segment.size for segment in replayed.start.segments)
        self.live: dict[int, tuple[int, int, int]] = {}
        self.waiting: set[int] = set()
        for block in replayed.start.blocks:
            known = block.freed_event is None and block.stack != NO_STACK
            self._add(block.address, block.size, block.requested, block.stack if known else len(owners))
        self.samples: list[tuple[int, tuple[int, ...], int]] = []

    def run(self) -> Account:
        """Go through all events."""
        trace, sizes = self.device.trace, self.replayed.block_sizes
        peak_event = self.replayed.peak_active_event
        peak = self._moment(-1) if peak_event < 0 else None
        every = max(1, len(trace) // SAMPLES)
        alloc, requested_free, freed = int(Action.ALLOC), int(Action.FREE_REQUESTED), int(Action.FREE_COMPLETED)
        columns = zip(trace.actions, trace.addresses, trace.sizes, sizes, strict=True)
        for index, (action, address, size, block_size) in enumerate(columns):
            if action == alloc:
                if address in self.live:
                    self._remove(address)
                self._add(address, block_size or size, size, trace.stacks[index])
                if index == peak_event:
                    peak = self._moment(index)
            elif action == freed:
                self._remove(address)
            elif action == requested_free:
                if address in self.live and address not in self.waiting:
                    self.waiting.add(address)
                    self.allocated -= self.live[address][0]
            elif action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
                self.reserved += size
            elif action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
                self.reserved -= size
            if index % every == 0 or index == peak_event:
                self.samples.append((index, tuple(self.sizes), self.reserved))
        end = self._moment(len(trace) - 1)
        if not self.samples or self.samples[-1][0] != len(trace) - 1:
            self.samples.append((len(trace) - 1, tuple(self.sizes), self.reserved))
        return Account(
            peak=peak or end,
            end=end,
            peak_reserved=self.replayed.peak_reserved,
            holes=holes(self.device.segments, self.replayed.settings),
            timeline=self._timeline(),
        )

    def _add(self, address: int, size: int, requested: int, stack: int) -> None:
        self.live[address] = (size, requested, stack)
        self.sizes[stack] += size
        self.counts[stack] += 1
        self.active += size
        self.allocated += size
        self.requested += requested

    def _remove(self, address: int) -> None:
        entry = self.live.pop(address, None)
        if entry is None:
            return
        size, requested, stack = entry
        self.sizes[stack] -= size
        self.counts[stack] -= 1
        self.active -= size
        self.requested -= requested
        if address in self.waiting:
            self.waiting.discard(address)
        else:
            self.allocated -= size

    def _time(self, event: int) -> int | None:
        times = self.device.trace.times_us
        return times[event] or None if 0 <= event < len(times) else None

    def _moment(self, event: int) -> Moment:
        shares = [
            Share(owner, size, count)
            for owner, size, count in zip(self.owners, self.sizes, self.counts, strict=True)
            if count
        ]
        return Moment(
            event=event,
            time_us=self._time(event),
            reserved=self.reserved,
            active=self.active,
            allocated=self.allocated,
            requested=self.requested,
            owners=tuple(sorted(shares, key=lambda share: share.size, reverse=True)),
        )

    def _timeline(self) -> Timeline:
        return Timeline(
            events=tuple(event for event, _, _ in self.samples),
            times_us=tuple(self._time(event) or 0 for event, _, _ in self.samples),
            owners=self.owners,
            sizes=tuple(sizes for _, sizes, _ in self.samples),
            reserved=tuple(reserved for _, _, reserved in self.samples),
        )


def by_category(shares: Sequence[Share]) -> dict[str, int]:
    """Bytes by what they are for, the largest first."""
    found: dict[str, int] = {}
    for share in shares:
        found[share.owner.category] = found.get(share.owner.category, 0) + share.size
    return dict(sorted(found.items(), key=lambda entry: entry[1], reverse=True))


def holes(segments: Sequence[SegmentRecord], settings: Settings) -> tuple[Hole, ...]:
    """Idle memory at the time of the snapshot, the most stranded first."""
    kinds: dict[tuple[str, int, bool], list[int]] = {}
    base: dict[tuple[str, int], int] = {}
    for segment in segments:
        pool = ("small" if segment.small else "large") + (
            "" if segment.pool_id == (0, 0) else f" of private pool {segment.pool_id[0]}.{segment.pool_id[1]}"
        )
        found = kinds.setdefault((pool, segment.stream, segment.expandable), [0, 0, 0, 0, 0])
        idle = [(block.address, block.size) for block in segment.blocks if not block.active]
        active = sum(block.size for block in segment.blocks if block.active)
        page = SMALL_SEGMENT if segment.small else settings.large_segment_size
        first = base.get((pool, segment.stream), segment.address)
        if segment.address - first > LARGEST_REGION:
            first = segment.address
        base[pool, segment.stream] = first
        if segment.expandable:
            stranded = sum(size - _whole_pages(address - first, size, page) for address, size in idle)
        else:
            stranded = sum(size for _, size in idle) if active else 0
        found[0] += 1
        found[1] += segment.size
        found[2] += active
        found[3] += stranded
        found[4] = max(found[4], max((size for _, size in idle), default=0))
    rows = [Hole(pool, stream, expandable, *numbers) for (pool, stream, expandable), numbers in kinds.items()]
    return tuple(sorted(rows, key=lambda hole: hole.stranded, reverse=True))


def _whole_pages(offset: int, size: int, page: int) -> int:
    return max(0, (offset + size) // page * page - -(-offset // page) * page)
