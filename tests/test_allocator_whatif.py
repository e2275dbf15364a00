"""What other settings would have led to, the recommendation, and what the commands print."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.allocator.accounting import account
from gpuwatch.allocator.document import compare, explain
from gpuwatch.allocator.lifetimes import lifetimes
from gpuwatch.allocator.parsing import parse_snapshot
from gpuwatch.allocator.replay import replay
from gpuwatch.allocator.settings import Settings, parse
from gpuwatch.allocator.sizes import GIB, MIB
from gpuwatch.allocator.whatif import cache_emptied
from gpuwatch.cli import main
from tests.tracemaking import Run, random_run


def fragmented(capacity: int | None = None) -> Run:
    """A batch that grows: each round frees blocks that are a little too small for the next."""
    run = Run(Settings(), capacity)
    held: list[int] = []
    for size in range(20, 60, 4):
        kept = run.allocate(2 * MIB, line=3)
        new = [run.allocate(size * MIB, line=12) for _ in range(4)]
        for address in held:
            run.free(address)
        held = [address for address in new if address is not None]
        assert kept is not None
        if len(held) < 4:
            break
    return run


def written(tmp_path: Path, run: Run, first: int = 0) -> str:
    """The run's snapshot as a file."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(run.snapshot(first=first)))
    return str(path)


def test_expandable_segments_are_recommended_where_a_growing_batch_fragments_memory() -> None:
    found = compare(parse_snapshot(fragmented().snapshot()))
    recorded, advice = found["recorded"], found["recommended"]
    assert found["trace"]["address_matches"] == found["trace"]["allocations"] > 0
    assert advice["conf"] == "expandable_segments:True" and advice["modelled"]
    assert advice["peak_reserved_bytes"] < 0.8 * advice["instead_of_bytes"] == 0.8 * recorded["peak_reserved_bytes"]
    assert advice["because"].startswith("expandable_segments:True would have reserved ")
    assert " instead of " in advice["because"]


def test_no_setting_is_recommended_where_the_live_bytes_are_the_peak() -> None:
    run = Run(Settings())
    for _ in range(20):
        run.allocate(40 * MIB)
    advice = compare(parse_snapshot(run.snapshot()))["recommended"]
    assert advice["conf"] is None
    assert advice["because"].startswith("no setting helps: the live bytes themselves peak at 800 MiB")


@pytest.mark.parametrize(("conf", "seed"), [("", 1), ("max_split_size_mb:40", 2), ("expandable_segments:True", 3)])
def test_the_settings_that_made_a_whole_trace_lead_to_its_own_figures(conf: str, seed: int) -> None:
    run = random_run(seed, conf, 250)
    found = compare(parse_snapshot(run.snapshot()), [conf or "expandable_segments:False"])
    recorded, (first, same) = found["recorded"], found["settings"]
    assert recorded["conf"] == first["conf"] == conf
    for name in ("peak_reserved_bytes", "stranded_bytes", "device_allocations", "device_frees"):
        assert recorded[name] == first[name] == same[name], name
    assert recorded["rebuilt_peak_reserved_bytes"] == recorded["peak_reserved_bytes"]
    assert not first["modelled"] and not same["modelled"]
    assert recorded["peak_reserved_bytes"] >= recorded["peak_active_bytes"]


def test_a_capacity_says_at_which_event_and_line_the_run_would_have_ended() -> None:
    run = fragmented()
    needed = compare(parse_snapshot(run.snapshot()))["recorded"]
    capacity = needed["peak_active_bytes"] - MIB
    found = compare(parse_snapshot(run.snapshot()), capacity=capacity)
    first = found["settings"][0]
    failed = first["out_of_memory"]
    assert first["fits"] is False and failed is not None
    event = run.model.events[failed["event"]]
    assert event["action"] == "alloc" and event["size"] == failed["requested_bytes"]
    assert failed["line"] in ("/home/me/train.py:12 forward", "/home/me/train.py:3 forward")
    assert found["recommended"]["conf"] is None and "above" in found["recommended"]["because"]


def test_a_setting_that_fits_where_the_recorded_one_fails_is_recommended() -> None:
    run = Run(Settings())
    for _ in range(6):
        temporary = run.allocate(100 * MIB, line=12)
        assert temporary is not None
        run.free(temporary)
        run.allocate(60 * MIB, line=3)  # pins a segment of 100 MiB
    snapshot = parse_snapshot(run.snapshot())
    found = compare(snapshot, capacity=480 * MIB)
    rows = {row["conf"]: row for row in found["settings"]}
    assert rows[""]["fits"] is False and rows["expandable_segments:True"]["fits"] is True
    failed = rows[""]["out_of_memory"]
    assert failed is not None and failed["line"] == "/home/me/train.py:12 forward" and failed["event"] == 21
    assert found["recommended"]["conf"] == "expandable_segments:True"
    assert "480 MiB, where the recorded settings run out of memory" in found["recommended"]["because"]
    tight = compare(snapshot, capacity=399 * MIB)["recommended"]
    assert tight["conf"] is None and "above 399 MiB" in tight["because"]


def test_a_recorded_failure_gives_the_capacity() -> None:
    run = fragmented(capacity=300 * MIB)
    assert run.model.events[-1]["action"] == "oom" or any(event["action"] == "oom" for event in run.model.events)
    found = compare(parse_snapshot(run.snapshot()))
    assert found["capacity_bytes"] == 300 * MIB and found["capacity_from"].startswith("the failed request")
    assert found["settings"][0]["fits"] is False


def test_memory_that_the_program_gave_back_is_told_from_memory_given_back_to_make_room() -> None:
    run = Run(Settings(), capacity=64 * MIB)
    first = run.allocate(40 * MIB, line=1)
    assert first is not None
    run.free(first)
    assert run.allocate(50 * MIB, line=2) is not None  # gives the first one back, to make room
    made_room = parse_snapshot(run.snapshot())
    assert cache_emptied(made_room.devices[0].trace, made_room.owners) == set()
    second = next(iter(run.live))
    run.free(second)
    run.model.stack = [{"name": "empty_cache", "filename": "/x/torch/cuda/memory.py", "line": 222}]
    run.device.empty_cache()
    emptied = parse_snapshot(run.snapshot())
    assert cache_emptied(emptied.devices[0].trace, emptied.owners) == {len(run.model.events) - 1}


def test_other_settings_start_from_the_blocks_in_use_when_a_trace_begins_in_the_middle() -> None:
    run = fragmented()
    found = compare(parse_snapshot(run.snapshot(first=len(run.model.events) // 2)))
    assert not found["recorded"]["trace_is_whole"]
    assert found["recorded"]["peak_reserved_bytes"] == run.model.reserved
    assert found["recorded"]["rebuilt_peak_reserved_bytes"] <= found["recorded"]["peak_reserved_bytes"]
    assert any("middle of the run" in note for note in found["notes"])


def test_settings_without_effect_or_with_a_trap_are_noted() -> None:
    snapshot = parse_snapshot(random_run(1, "", 30).snapshot())
    notes = compare(snapshot, ["garbage_collection_threshold:0.8", "expandable_segments:True,max_split_size_mb:64"])
    assert any("does nothing without a memory fraction" in note for note in notes["notes"])
    assert any("without bound" in note for note in notes["notes"])


# -- accounts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_every_byte_at_the_peak_and_at_the_end_has_an_owner(conf: str) -> None:
    run = random_run(6, conf, 200, streams=(0, 1))
    snapshot = parse_snapshot(run.snapshot(first=150))
    device = snapshot.devices[0]
    replayed = replay(device, parse(conf))
    found = account(device, replayed, snapshot.owners)
    for moment in (found.peak, found.end):
        assert sum(share.size for share in moment.owners) == moment.active
        assert moment.requested <= moment.active <= moment.reserved and moment.allocated <= moment.active
    assert found.peak.active == replayed.peak_active >= found.end.active == run.model.active
    assert found.end.reserved == run.model.reserved
    waiting = sum(run.live[address][0].size for address in run.waiting)
    assert found.end.active - found.end.allocated == waiting
    assert sum(hole.stranded for hole in found.holes) == run.model.stranded
    assert {share.owner.line for share in found.end.owners} >= {"/home/me/train.py:1 forward"}


def test_blocks_that_every_step_adds_are_found_and_those_of_one_step_are_not() -> None:
    run = Run(Settings())
    marks: list[dict[str, Any]] = []
    once = run.allocate(30 * MIB, line=50)
    for _ in range(8):
        temporary = run.allocate(5 * MIB, line=60)
        run.allocate(3 * MIB, line=70)
        assert temporary is not None
        run.free(temporary)
        time = 1_700_000_000_000_000 + len(run.model.events) - 1
        marks.append({"stage": "END", "name": "Optimizer.step#SGD.step", "device": 0, "time_us": time})
    content = {**run.snapshot(), "external_annotations": marks}
    snapshot = parse_snapshot(content)
    found = lifetimes(snapshot.devices[0], replay(snapshot.devices[0], Settings()), snapshot.owners)
    growing = {kept.owner.line: kept.bytes_per_step for kept in found.kept if kept.bytes_per_step}
    assert growing == {"/home/me/train.py:70 forward": 3 * MIB} and once is not None
    assert explain(snapshot)[0]["devices"][0]["kept"][0]["bytes_per_step"] == 3 * MIB


# -- the commands ---------------------------------------------------------------------------------------------


def test_the_fields_of_the_comparison_are_frozen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, fragmented())
    assert main(["replay", path, "--conf", "expandable_segments:True", "max_split_size_mb:64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["trace"]) == [
        "events",
        "allocations",
        "address_matches",
        "segment_allocations",
        "segment_matches",
    ]
    assert {"conf", "peak_reserved_bytes", "peak_active_bytes"} <= set(found["recorded"])
    assert [row["conf"] for row in found["settings"]] == ["", "expandable_segments:True", "max_split_size_mb:64"]
    for row in found["settings"]:
        assert list(row) == [
            *("conf", "peak_reserved_bytes", "stranded_bytes", "device_allocations", "device_frees"),
            *("retries", "fits", "out_of_memory", "modelled"),
        ]
    assert list(found["recommended"]) == ["conf", "because", "peak_reserved_bytes", "instead_of_bytes", "modelled"]
    assert list(found) == [
        *("trace", "recorded", "settings", "recommended", "capacity_bytes", "capacity_from", "rules", "notes")
    ]


def test_the_comparison_is_readable_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", written(tmp_path, fragmented()), "--capacity", "700MiB"]) == 0
    shown = capsys.readouterr().out
    assert "as recorded" in shown and "(modelled)" in shown and "capacity 700 MiB" in shown
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in shown


def test_the_account_is_readable_on_a_terminal_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, fragmented())
    assert main(["snapshot", path]) == 0
    shown = capsys.readouterr().out
    assert "/home/me/train.py:12 forward" in shown and "largest hole" in shown and "stranded" in shown
    assert main(["snapshot", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["rules", "devices", "notes"]
    assert list(found["devices"][0]) == [
        *("device", "trace", "peak_reserved_bytes", "peak", "end", "holes", "steps", "kept")
    ]


def test_the_html_report_needs_nothing_else_and_shows_names_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run = fragmented()
    content: Any = run.snapshot()
    hostile = [{"name": "<script>alert(1)</script> $x^2$", "filename": "/home/me/_évil.py", "line": 1}]
    for event in content["device_traces"][0]:
        event["frames"] = hostile
    path, page = tmp_path / "snapshot.pickle", tmp_path / "page.html"
    path.write_bytes(pickle.dumps(content))
    assert main(["snapshot", str(path), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text and "<script" not in text and "&lt;script&gt;" in text
    assert not [found for found in ("http://www.w3.org/TR", "src=", "@import", "<link") if found in text]


def test_without_the_plot_library_one_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = written(tmp_path, fragmented())
    assert main(["snapshot", path, "--html", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install 'torch-gpuwatch[plot]'" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--conf", "max_split_size_mb:3"], "--conf: max_split_size_mb is '3'"),
        (["--conf", "nonsense"], "--conf: 'nonsense' is not a setting"),
        (["--capacity", "big"], "'big' is not a size in bytes"),
        (["--capacity", "0"], "'0' is not a size in bytes"),
    ],
)
def test_a_wrong_question_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["replay", written(tmp_path, fragmented()), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and said in shown.err


@pytest.mark.parametrize(
    ("text", "size"), [("40GiB", 40 * GIB), ("80GB", 80 * 10**9), ("512", 512), ("1.5 MiB", 3 << 19)]
)
def test_a_capacity_is_read_with_its_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, size: int
) -> None:
    main(["replay", written(tmp_path, random_run(1, "", 10)), "--capacity", text, "--json"])
    assert json.loads(capsys.readouterr().out)["capacity_bytes"] == size
