"""Which rules a snapshot follows: what it says of its settings, and what its bytes show where it says nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from gpuwatch.allocator.settings import Settings, conf_of
from gpuwatch.allocator.shapes import Action, DeviceRecord, Snapshot
from gpuwatch.allocator.sizes import LARGE_SEGMENT_BELOW, LARGEST_SMALL, MIB, Rounding

CERTAINLY_BELOW = LARGE_SEGMENT_BELOW // 4 * 3
"""Requests up to here are, rounded or not, put into segments of the common size."""

DIVISIONS_TRIED = (0, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Rules:
    """The settings that a replay uses, and where they come from."""

    settings: Settings
    source: str

    @property
    def text(self) -> str:
        """One line for a person."""
        conf = conf_of(self.settings) or "the defaults"
        return f"torch's native allocator with {conf} ({self.source})"


def rules_of(snapshot: Snapshot) -> Rules:
    """The rules by which to replay a snapshot."""
    if snapshot.stated is not None:
        shown = _shown_large_segment(snapshot.devices, snapshot.stated.large_segment_size)
        if shown != snapshot.stated.large_segment_size:
            settings = replace(snapshot.stated, large_segment_size=shown)
            return Rules(settings, "settings stated in the snapshot, the size of large segments as it shows")
        return Rules(snapshot.stated, "settings stated in the snapshot")
    settings = Settings(
        expandable_segments=_expandable(snapshot.devices),
        roundup_power2_divisions=(_divisions(snapshot.devices),) * 16,
        large_segment_size=_shown_large_segment(snapshot.devices, Settings().large_segment_size),
    )
    return Rules(settings, "the snapshot states no settings: inferred from its blocks and segments")


def _expandable(devices: tuple[DeviceRecord, ...]) -> bool:
    maps = (int(Action.SEGMENT_MAP), int(Action.SEGMENT_ALLOC))
    last = [action for device in devices for action in device.trace.actions if action in maps][-1:]
    if last:
        return last[0] == Action.SEGMENT_MAP
    return any(segment.expandable for device in devices for segment in device.segments)


def _divisions(devices: tuple[DeviceRecord, ...]) -> int:
    """The rounding that gives the blocks of the small pools their sizes: nothing else makes them larger."""
    pairs = {
        (block.requested, block.size)
        for device in devices
        for segment in device.segments
        if segment.small
        for block in segment.blocks
        if block.active and block.requested
    }
    for divisions in DIVISIONS_TRIED:
        rounding = Rounding(Settings(roundup_power2_divisions=(divisions,) * 16))
        if all(rounding[requested] == size for requested, size in pairs):
            return divisions
    return 0


def _shown_large_segment(devices: tuple[DeviceRecord, ...], stated: int) -> int:
    """The size of segments that requests of 1 to 10 MiB were given, where all agree and it is not what is stated."""
    found: Counter[int] = Counter()
    for device in devices:
        trace = device.trace
        for index, action in enumerate(trace.actions[:-1]):
            if action == Action.SEGMENT_ALLOC and trace.actions[index + 1] == Action.ALLOC:
                asked = LARGEST_SMALL < trace.sizes[index + 1] <= CERTAINLY_BELOW
                if asked and trace.addresses[index] == trace.addresses[index + 1]:
                    found[trace.sizes[index]] += 1
    if len(found) == 1 and next(iter(found)) % MIB == 0 and next(iter(found)) > LARGE_SEGMENT_BELOW:
        return next(iter(found))
    return stated
