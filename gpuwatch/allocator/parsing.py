"""From the dictionary that torch makes to a :class:`Snapshot`: every field checked, shapes of torch 2.1 to 2.13."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from gpuwatch.allocator.owners import Owners
from gpuwatch.allocator.reading import HOW_TO_MAKE, SnapshotError, read_file
from gpuwatch.allocator.settings import recorded
from gpuwatch.allocator.shapes import (
    ACTIONS,
    NO_STACK,
    UNKNOWN_OWNER,
    Action,
    BlockRecord,
    DeviceRecord,
    Mark,
    Owner,
    SegmentRecord,
    Snapshot,
    Trace,
)

LARGEST = 1 << 60
"""Addresses above this are no device's."""

LARGEST_SIZE = 1 << 48

MOST_DEVICES = 1024


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file that torch wrote. Raises SnapshotError with one line that names the file."""
    content = read_file(path)
    try:
        return parse_snapshot(content)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None


def parse_snapshot(content: object) -> Snapshot:
    """The snapshot in what ``torch.cuda.memory._snapshot()`` returns (or a list of segments). Raises SnapshotError."""
    if isinstance(content, list):
        content = {"segments": content}
    if not isinstance(content, Mapping) or not ("segments" in content or "device_traces" in content):
        raise SnapshotError(f"holds a {type(content).__name__} without segments, not a snapshot; {HOW_TO_MAKE}")
    stacks = _Stacks()
    skipped = 0
    segments: dict[int, list[SegmentRecord]] = {}
    for entry in _list(content, "segments"):
        device, segment = _segment(entry, stacks)
        if segment is None:
            skipped += 1
        else:
            segments.setdefault(device, []).append(segment)
    traces: dict[int, Trace] = {}
    for index, events in enumerate(_list(content, "device_traces")[:MOST_DEVICES]):
        if isinstance(events, Sequence) and not isinstance(events, str | bytes):
            traces[index], left_out = _trace(events, stacks)
            skipped += left_out
    marks = _marks(content)
    stated = content.get("allocator_settings")
    used = sorted({*segments, *(index for index, trace in traces.items() if len(trace))})
    return Snapshot(
        devices=tuple(
            DeviceRecord(
                index=index,
                segments=tuple(sorted(segments.get(index, []), key=lambda segment: segment.address)),
                trace=traces.get(index) or Trace(),
                marks=tuple(mark for device, mark in marks if device in (index, None)),
            )
            for index in used
        ),
        owners=tuple(stacks.owners),
        stated=recorded(stated) if isinstance(stated, Mapping) else None,
        skipped_events=skipped,
    )


class _Stacks:
    """Numbers for lists of frames. Torch writes one list for all events of a stack, so its identity is enough."""

    def __init__(self) -> None:
        self.owners: list[Owner] = [UNKNOWN_OWNER]
        self._known: dict[int, int] = {}
        self._owners = Owners()
        self._numbers: dict[Owner, int] = {UNKNOWN_OWNER: NO_STACK}

    def number(self, frames: object) -> int:
        """The number of the owner that these frames name."""
        if not frames:
            return NO_STACK
        number = self._known.get(id(frames))
        if number is None:
            owner = self._owners.of(frames)
            number = self._numbers.get(owner)
            if number is None:
                number = self._numbers[owner] = len(self.owners)
                self.owners.append(owner)
            self._known[id(frames)] = number
        return number


def _list(content: Mapping[object, object], name: str) -> Sequence[object]:
    entries = content.get(name, ())
    if not isinstance(entries, list | tuple):
        raise SnapshotError(f"its {name} are a {type(entries).__name__}, not a list; {HOW_TO_MAKE}")
    return entries


def _trace(events: Sequence[object], stacks: _Stacks) -> tuple[Trace, int]:
    trace = Trace()
    actions, addresses, sizes = trace.actions, trace.addresses, trace.sizes
    streams, times, numbers = trace.streams, trace.times_us, trace.stacks
    number_of = stacks.number
    skipped = 0
    for event in events:
        if type(event) is not dict:
            skipped += 1
            continue
        action = event.get("action")
        code = ACTIONS.get(action, Action.OTHER) if type(action) is str else None
        address = event.get("addr")
        if address is None:
            address = event.get("device_free", event.get("address", 0))
        size, stream, time = event.get("size", 0), event.get("stream", 0), event.get("time_us", 0)
        if code is None or not (
            type(address) is type(size) is type(stream) is type(time) is int
            and 0 <= address < LARGEST
            and 0 <= size < LARGEST_SIZE
            and 0 <= stream < 1 << 64
            and 0 <= time < 1 << 64
        ):
            skipped += 1
            continue
        pool_id = event.get("segment_pool_id", event.get("pool_id"))
        if pool_id is not None and (pair := _pair(pool_id)) != (0, 0):
            trace.pool_ids[len(actions)] = pair
        actions.append(code)
        addresses.append(address)
        sizes.append(size)
        streams.append(stream)
        times.append(time)
        numbers.append(number_of(event.get("frames")))
    return trace, skipped


def _segment(entry: object, stacks: _Stacks) -> tuple[int, SegmentRecord | None]:
    if not isinstance(entry, Mapping):
        return 0, None
    device, address, size = entry.get("device", 0), entry.get("address"), entry.get("total_size")
    stream, blocks = entry.get("stream", 0), entry.get("blocks", ())
    kind = entry.get("segment_type", "small" if entry.get("is_small") else "large")
    if not (_whole(device) and device < MOST_DEVICES and _whole(address) and _size(size) and _whole(stream)):
        return 0, None
    if not isinstance(blocks, list | tuple):
        return 0, None
    records = []
    cursor = address
    for block in blocks:
        record = _block(block, cursor, stacks)
        if record is None or record.address != cursor or cursor + record.size > address + size:
            return 0, None
        cursor += record.size
        records.append(record)
    return device, SegmentRecord(
        address=address,
        size=size,
        stream=stream,
        small=kind == "small",
        pool_id=_pair(entry.get("segment_pool_id", (0, 0))),
        expandable=entry.get("is_expandable") is True,
        blocks=tuple(records),
    )


def _block(block: object, cursor: int, stacks: _Stacks) -> BlockRecord | None:
    if not isinstance(block, Mapping):
        return None
    size, state, address = block.get("size"), block.get("state", "inactive"), block.get("address", cursor)
    requested, frames = block.get("requested_size"), block.get("frames")
    history = block.get("history")
    if isinstance(history, list) and history and isinstance(history[0], Mapping):  # torch before 2.1
        requested = history[0].get("real_size", requested)
        frames = frames or history[0].get("frames")
    if not (_size(size) and _whole(address)) or not isinstance(state, str):
        return None
    return BlockRecord(
        address=address,
        size=size,
        requested=requested if _whole(requested) and requested <= size else None,
        active=state != "inactive",
        allocated=state == "active_allocated",
        stack=stacks.number(frames),
    )


def _marks(content: Mapping[object, object]) -> list[tuple[int | None, Mark]]:
    found: list[tuple[int | None, Mark]] = []
    entries = content.get("external_annotations")
    for entry in entries if isinstance(entries, list | tuple) else ():
        if not isinstance(entry, Mapping):
            continue
        name, time, device = entry.get("name"), entry.get("time_us"), entry.get("device")
        if isinstance(name, str) and _whole(time):
            found.append((device if _whole(device) else None, Mark(time, name, entry.get("stage") == "START")))
    return found


def _pair(value: object) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) == 2 and _whole(value[0]) and _whole(value[1]):
        return value[0], value[1]
    return 0, 0


def _whole(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < LARGEST


def _size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < LARGEST_SIZE
