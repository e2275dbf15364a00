"""The exact replay: traces that the model itself made, whole and cut, and real ones where there are any."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from gpuwatch.allocator.accounting import account
from gpuwatch.allocator.inference import rules_of
from gpuwatch.allocator.parsing import parse_snapshot, read_snapshot
from gpuwatch.allocator.replay import Replay, replay
from gpuwatch.allocator.settings import Settings, parse
from gpuwatch.allocator.sizes import GIB, MIB
from tests.tracemaking import Run, random_run

CONFS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:40",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:64",
]
REAL = sorted((Path(__file__).parents[2] / "shared" / "snapshots").glob("*.pickle"))
"""Snapshots of real runs; not part of the repository."""


def replayed(content: object) -> Replay:
    """The replay of the first device of a snapshot, under the rules that it states or shows."""
    snapshot = parse_snapshot(content)
    return replay(snapshot.devices[0], rules_of(snapshot).settings)


def exact(found: Replay) -> bool:
    """Whether every decision of the model is the recorded one."""
    seen = found.fidelity
    return (seen.address_matches, seen.segment_matches) == (seen.allocations, seen.segment_allocations)


@pytest.mark.parametrize("conf", CONFS)
@settings(max_examples=12, deadline=None)
@given(seed=some.integers(0, 10_000), capacity=some.sampled_from([None, GIB, 300 * MIB]), streams=some.integers(1, 3))
def test_a_whole_trace_is_replayed_exactly_and_leads_to_the_recorded_state(
    conf: str, seed: int, capacity: int | None, streams: int
) -> None:
    run = random_run(seed, conf, 150, capacity=capacity, streams=tuple(range(streams)))
    found = replayed(run.snapshot())
    assert exact(found) and found.start.empty and not found.start.inconsistencies
    assert found.fidelity.allocations == sum(event["action"] == "alloc" for event in run.model.events)
    model = found.allocator
    assert (model.reserved, model.active, model.stranded) == (run.model.reserved, run.model.active, run.model.stranded)
    assert {(b.address, b.size, b.use) for b in model.blocks.values() if b.region is None} == {
        (b.address, b.size, b.use) for b in run.model.blocks.values() if b.region is None
    }
    assert found.peak_reserved >= found.peak_active >= found.allocator.active


@pytest.mark.parametrize("conf", CONFS)
@settings(max_examples=12, deadline=None)
@given(seed=some.integers(0, 10_000), kept=some.floats(0.05, 0.95), streams=some.integers(1, 3))
def test_a_trace_that_begins_in_the_middle_is_replayed_from_the_state_then(
    conf: str, seed: int, kept: float, streams: int
) -> None:
    run = random_run(seed, conf, 150, streams=tuple(range(streams)))
    first = int(len(run.model.events) * (1 - kept))
    while first < len(run.model.events) and run.model.events[first - 1]["action"] in ("segment_alloc", "segment_map"):
        first += 1  # the ring buffer cuts anywhere; between a segment and its request is tested below
    found = replayed(run.snapshot(first=first))
    assert not found.start.inconsistencies
    seen = found.fidelity
    # What nothing in the trace shows of the state before it may cost a match; it must stay rare.
    assert seen.allocations - seen.address_matches <= max(2, seen.allocations // 50)
    assert found.allocator.reserved == run.model.reserved


def test_most_traces_that_begin_in_the_middle_are_replayed_exactly() -> None:
    runs = [random_run(seed, conf, 200) for conf in CONFS for seed in range(3)]
    found = [replayed(run.snapshot(first=len(run.model.events) // 2)) for run in runs]
    assert sum(map(exact, found)) >= len(found) - 1


def test_the_unsplit_remainder_of_a_block_from_before_the_trace_is_inferred() -> None:
    run = Run(Settings())
    big = run.allocate(44 * MIB)
    assert big is not None
    run.free(big)
    first = run.allocate(22 * MIB)
    second = run.allocate(22 * MIB)
    assert first is not None and second is not None
    run.free(first)
    kept = run.allocate(21 * MIB + 512 * 1024)  # takes the 22 MiB hole whole
    assert kept == first
    run.free(second)
    cut = len(run.model.events)
    following = run.allocate(3 * MIB)
    assert following == first + 22 * MIB
    run.free(kept)
    run.allocate(22 * MIB)
    found = replayed(run.snapshot(first=cut))
    assert exact(found) and found.start.inferred_blocks == 1


@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "roundup_power2_divisions:8", "large_segment_size_mb:64"]
)
def test_rules_that_a_snapshot_does_not_state_are_inferred_from_it(conf: str) -> None:
    run = random_run(4, conf, 300)
    snapshot = parse_snapshot(run.snapshot(stated=False))
    rules = rules_of(snapshot)
    assert rules.settings == parse(conf) or conf.startswith("large")
    assert rules.settings.large_segment_size == parse(conf).large_segment_size
    assert "inferred" in rules.text
    assert exact(replay(snapshot.devices[0], rules.settings))


def test_several_devices_are_replayed_each_by_itself() -> None:
    one, two = random_run(1, "", 80).snapshot(), random_run(2, "", 120).snapshot()
    segments: Any = two["segments"]
    for entry in segments:
        entry["device"] = 3
    traces: Any = [one["device_traces"], two["device_traces"]]
    merged = {**one, "segments": [*one["segments"], *segments], "device_traces": [traces[0][0], [], [], traces[1][0]]}  # type: ignore[misc]
    snapshot = parse_snapshot(merged)
    assert [device.index for device in snapshot.devices] == [0, 3]
    assert all(exact(replay(device, Settings())) for device in snapshot.devices)


def test_events_of_no_consequence_and_fields_that_miss_change_nothing() -> None:
    content: Any = random_run(5, "", 120).snapshot(stated=False)
    events = content["device_traces"][0]
    events.insert(7, {"action": "snapshot", "addr": 0, "size": 123, "stream": 0})
    events.insert(9, {"action": "user_defined", "addr": 0, "size": 0, "stream": 0, "user_metadata": "epoch 2"})
    events.insert(11, {"action": "something_newer", "size": 5})
    for event in events:
        event.pop("time_us", None)
        event.pop("frames", None)
        if event["stream"] == 0 if "stream" in event else False:
            event.pop("stream")
    for entry in content["segments"]:
        for name in ("device", "segment_pool_id", "is_expandable"):
            entry.pop(name)
        for block in entry["blocks"]:
            for name in ("address", "requested_size", "frames"):
                block.pop(name)
    assert exact(replayed(content))


def test_a_private_pool_is_searched_alone() -> None:
    content: Any = random_run(8, "", 150).snapshot()
    for entry in content["segments"]:
        entry["segment_pool_id"] = (0, 2)
    everything = {**content, "device_traces": [[]]}
    assert parse_snapshot(everything).devices[0].segments[0].pool_id == (0, 2)
    found = replayed(content)
    assert found.pool_ids and set(found.pool_ids.values()) == {(0, 2)}


ACTIONS_TO_TRY = ["alloc", "free_completed", "segment_free", "segment_alloc", "segment_map", "segment_unmap", "oom"]
WHOLE = [random_run(number, conf, 60) for number, conf in enumerate(CONFS)]


@settings(max_examples=100, deadline=None)
@given(seed=some.integers(0, 1000), data=some.data())
def test_a_trace_that_contradicts_itself_is_replayed_to_its_end(seed: int, data: some.DataObject) -> None:
    content: Any = copy.deepcopy(WHOLE[seed % 5].snapshot(first=seed % 50))
    events = content["device_traces"][0]
    for _ in range(data.draw(some.integers(1, 12))):
        index = data.draw(some.integers(0, len(events) - 1))
        kind = data.draw(some.sampled_from(["drop", "move", "resize", "rename", "repeat"]))
        if kind == "drop" and len(events) > 1:
            del events[index]
        elif kind == "move":
            events[index]["addr"] = events[index].get("addr", 0) + data.draw(some.integers(-4096, 1 << 24))
        elif kind == "resize":
            events[index]["size"] = data.draw(some.integers(0, 1 << 59))
        elif kind == "rename":
            events[index]["action"] = data.draw(some.sampled_from(ACTIONS_TO_TRY))
        else:
            events.append(dict(events[index]))
    snapshot = parse_snapshot(content)
    found = replay(snapshot.devices[0], rules_of(snapshot).settings)
    assert found.fidelity.address_matches <= found.fidelity.allocations
    account(snapshot.devices[0], found, snapshot.owners)


@pytest.mark.skipif(not REAL, reason="no snapshots of real runs here")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_traces_are_replayed_exactly(path: Path) -> None:
    snapshot = read_snapshot(path)
    settings_used = rules_of(snapshot).settings
    assert all(exact(replay(device, settings_used)) for device in snapshot.devices)
