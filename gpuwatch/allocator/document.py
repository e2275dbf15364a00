"""A snapshot explained, as plain data: what ``gpuwatch snapshot --json`` and ``gpuwatch replay --json`` print.

:func:`explain` and :func:`compare` also take the dictionary of a live ``torch.cuda.memory._snapshot()`` once
:func:`gpuwatch.allocator.parsing.parse_snapshot` has checked it. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from gpuwatch.advisor import spoken
from gpuwatch.allocator.accounting import Account, Moment, account, by_category
from gpuwatch.allocator.inference import rules_of
from gpuwatch.allocator.lifetimes import Lifetimes, lifetimes
from gpuwatch.allocator.parts import (
    DevicePart,
    FailurePart,
    HolePart,
    KeptPart,
    MomentPart,
    OwnerPart,
    RecommendedPart,
    RecordedPart,
    ReplayDocument,
    SettingPart,
    SnapshotDocument,
    TracePart,
)
from gpuwatch.allocator.reading import SnapshotError
from gpuwatch.allocator.recommendation import candidates, recommend
from gpuwatch.allocator.replay import Fidelity, Replay, replay
from gpuwatch.allocator.settings import Settings, conf_of
from gpuwatch.allocator.shapes import DeviceRecord, Owner, Snapshot
from gpuwatch.allocator.whatif import BEFORE_THE_TRACE, Outcome, OutOfMemory, capacity_at_failure, outcome_under

OWNERS_LISTED = 40
NO_TRACE = (
    "it holds no events to replay; record them with torch.cuda.memory._record_memory_history() before the training loop"
)


def explain(snapshot: Snapshot) -> tuple[SnapshotDocument, list[Account]]:
    """Who owns the memory of each device; the accounts also hold the picture over time. Raises SnapshotError."""
    rules = rules_of(snapshot)
    notes = _notes(snapshot)
    devices, accounts = [], []
    for device in snapshot.devices:
        replayed = replay(device, rules.settings)
        found = account(device, replayed, snapshot.owners)
        notes += _replay_notes(device, replayed)
        accounts.append(found)
        devices.append(_device(device, replayed, found, lifetimes(device, replayed, snapshot.owners)))
    if not devices:
        raise SnapshotError("it holds neither memory nor events: nothing was allocated on a GPU before it was taken")
    return SnapshotDocument(rules=rules.text, devices=devices, notes=notes), accounts


def compare(snapshot: Snapshot, confs: Sequence[str] = (), capacity: int | None = None) -> ReplayDocument:
    """What other settings would have led to, and the one to choose. Raises SnapshotError, SettingsError."""
    rules = rules_of(snapshot)
    if rules.settings.backend != "native":
        raise SnapshotError(f"it was made with backend:{rules.settings.backend}, which leaves placement to the driver")
    tried = candidates(rules.settings, confs)
    replays = [(device, replay(device, rules.settings)) for device in snapshot.devices if len(device.trace)]
    if not replays:
        raise SnapshotError(NO_TRACE)
    device, replayed = max(replays, key=lambda pair: pair[1].peak_reserved)
    if not replayed.complete:
        raise SnapshotError("its events contradict each other or the allocator's rules: they cannot be replayed")
    notes = _notes(snapshot) + [note for pair in replays for note in _replay_notes(*pair)]
    capacity_from = "--capacity" if capacity is not None else ""
    if capacity is None and (capacity := capacity_at_failure(device, replayed)) is not None:
        capacity_from = "the failed request: what was reserved then and what the device had free"
    owners, start = snapshot.owners, replayed.start
    as_recorded = outcome_under(device, replayed, rules.settings, owners, capacity, from_recorded_state=True)
    baseline = as_recorded if start.empty else outcome_under(device, replayed, rules.settings, owners, capacity)
    outcomes = [
        (text, settings, outcome_under(device, replayed, settings, owners, capacity)) for text, settings in tried
    ]
    advice = recommend(
        baseline, [(text, outcome) for text, _, outcome in outcomes], capacity, lambda size: spoken(size, "bytes")
    )
    notes += [note for text, settings, _ in outcomes for note in _setting_notes(text, settings)]
    if not start.empty:
        notes.append(
            "the trace begins in the middle of the run: other settings, and the recorded ones they are compared with, "
            "start from the blocks in use then, packed together"
        )
    return ReplayDocument(
        trace=_total([replayed.fidelity for _, replayed in replays]),
        recorded=RecordedPart(
            conf=conf_of(rules.settings),
            device=device.index,
            peak_reserved_bytes=replayed.peak_reserved,
            peak_active_bytes=replayed.peak_active,
            stranded_bytes=replayed.stranded_at_peak,
            device_allocations=replayed.device_allocations,
            device_frees=replayed.device_frees,
            rebuilt_peak_reserved_bytes=baseline.peak_reserved,
            trace_is_whole=start.empty,
        ),
        settings=[
            _recorded_setting(conf_of(rules.settings), replayed, as_recorded, capacity),
            *(_setting(text, outcome, capacity, settings != rules.settings) for text, settings, outcome in outcomes),
        ],
        recommended=RecommendedPart(
            conf=advice.conf,
            because=advice.because,
            peak_reserved_bytes=advice.peak_reserved,
            instead_of_bytes=advice.instead_of,
            modelled=advice.conf is not None,
        ),
        capacity_bytes=capacity,
        capacity_from=capacity_from,
        rules=rules.text,
        notes=notes,
    )


def _total(parts: Sequence[Fidelity]) -> TracePart:
    return TracePart(
        events=sum(part.events for part in parts),
        allocations=sum(part.allocations for part in parts),
        address_matches=sum(part.address_matches for part in parts),
        segment_allocations=sum(part.segment_allocations for part in parts),
        segment_matches=sum(part.segment_matches for part in parts),
    )


def _recorded_setting(conf: str, replayed: Replay, outcome: Outcome, capacity: int | None) -> SettingPart:
    part = _setting(conf, outcome, capacity, modelled=False)
    part["peak_reserved_bytes"] = replayed.peak_reserved
    part["stranded_bytes"] = replayed.stranded_at_peak
    part["device_allocations"], part["device_frees"] = replayed.device_allocations, replayed.device_frees
    return part


def _setting(conf: str, outcome: Outcome, capacity: int | None, modelled: bool) -> SettingPart:
    return SettingPart(
        conf=conf,
        peak_reserved_bytes=outcome.peak_reserved,
        stranded_bytes=outcome.stranded,
        device_allocations=outcome.device_allocations,
        device_frees=outcome.device_frees,
        retries=outcome.retries,
        fits=None if capacity is None else outcome.out_of_memory is None,
        out_of_memory=_failure(outcome.out_of_memory),
        modelled=modelled,
    )


def _failure(ended: OutOfMemory | None) -> FailurePart | None:
    if ended is None:
        return None
    return FailurePart(
        event=ended.event,
        line="(before the trace begins)" if ended.event == BEFORE_THE_TRACE else ended.owner.line,
        requested_bytes=ended.requested,
        reserved_bytes=ended.reserved,
        active_bytes=ended.active,
    )


def _device(device: DeviceRecord, replayed: Replay, found: Account, stays: Lifetimes) -> DevicePart:
    return DevicePart(
        device=device.index,
        trace=_total([replayed.fidelity]),
        peak_reserved_bytes=found.peak_reserved,
        peak=_moment(found.peak),
        end=_moment(found.end),
        holes=[
            HolePart(
                pool=hole.pool,
                stream=hole.stream,
                expandable=hole.expandable,
                segments=hole.segments,
                reserved_bytes=hole.reserved,
                active_bytes=hole.active,
                stranded_bytes=hole.stranded,
                largest_hole_bytes=hole.largest_hole,
            )
            for hole in found.holes
        ],
        steps=stays.steps,
        kept=[
            KeptPart(
                line=kept.owner.line,
                category=kept.owner.category,
                bytes=kept.size,
                blocks=kept.blocks,
                bytes_per_step=kept.bytes_per_step,
            )
            for kept in stays.kept[:OWNERS_LISTED]
        ],
    )


def _moment(moment: Moment) -> MomentPart:
    when = moment.time_us
    return MomentPart(
        event=moment.event,
        time=_time(when),
        reserved_bytes=moment.reserved,
        active_bytes=moment.active,
        allocated_bytes=moment.allocated,
        requested_bytes=moment.requested,
        owners=[_owner(share.owner, share.size, share.blocks) for share in moment.owners[:OWNERS_LISTED]],
        categories=by_category(moment.owners),
    )


def _owner(owner: Owner, size: int, blocks: int) -> OwnerPart:
    return OwnerPart(line=owner.line, category=owner.category, bytes=size, blocks=blocks)


def _time(microseconds: int | None) -> str | None:
    if microseconds is None or not 0 < microseconds < 1 << 52:
        return None
    return datetime.fromtimestamp(microseconds / 1e6, timezone.utc).isoformat(timespec="microseconds")


def _notes(snapshot: Snapshot) -> list[str]:
    if not snapshot.skipped_events:
        return []
    return [f"{snapshot.skipped_events:,} entries could not be understood and were left out"]


def _replay_notes(device: DeviceRecord, replayed: Replay) -> list[str]:
    notes = []
    fidelity, start = replayed.fidelity, replayed.start
    where = f"device {device.index}"
    if fidelity.first_mismatch is not None:
        event = fidelity.first_mismatch
        notes.append(f"{where}: the replay differs from the trace, first at event {event:,}; figures are approximate")
    if not replayed.complete:
        notes.append(f"{where}: the replay was given up, the trace does not follow the allocator's rules")
    if start.inconsistencies:
        notes.append(f"{where}: {start.inconsistencies:,} events do not lead to the memory that the snapshot lists")
    if start.inferred_blocks:
        notes.append(
            f"{where}: {start.inferred_blocks:,} blocks from before the trace hold an unsplit remainder, "
            "inferred from what followed them"
        )
    return notes


def _setting_notes(text: str, settings: Settings) -> list[str]:
    notes = []
    if settings.garbage_collection_threshold and settings.memory_fraction is None:
        notes.append(f"{text}: garbage_collection_threshold does nothing without a memory fraction")
    if settings.expandable_segments and settings.max_split_size < 1 << 62:
        notes.append(f"{text}: max_split_size_mb with expandable segments can grow what is reserved without bound")
    return notes
