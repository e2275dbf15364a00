"""The report: as data, on a terminal, as HTML, and the lines at the end of a run."""

from __future__ import annotations

import html.parser
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gpuwatch.catalog import DEVICE_ACTIVE_PEAK, DEVICE_CAPACITY, HOST_PEAK, RANK_EXIT_INFO
from gpuwatch.layout import State, Word
from gpuwatch.reader import Snapshot, read
from gpuwatch.report.document import document
from gpuwatch.report.html import page
from gpuwatch.report.runs import RunError, find_run, select_run
from gpuwatch.report.shape import Document
from gpuwatch.report.summary import summary_lines
from gpuwatch.report.terminal import rendered
from tests.recorded import USUAL_STEP, write_run

ANOMALY = ("debug-anomaly", "train.py:41", "", 190.0)
GRAPHS = ("leak-graph-retained", "losses, train.py:60", "a list of 150 tensors", 150.0)
NASTY = "\x1b[31m<b>[bold]&amp;</b>\x07"


def report_of(directory: Path, name: str = "train") -> Document:
    return document(find_run(directory, name))


def on_terminal(report: Document, width: int = 80, encoding: str = "utf-8") -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(rendered(report, encoding))
    return captured.get()


# -- as data ----------------------------------------------------------------------------------------------------------


def test_the_document_has_the_promised_fields(tmp_path: Path) -> None:
    write_run(tmp_path, observations=[ANOMALY])
    report = report_of(tmp_path)
    assert list(report) == ["run", "time", "memory", "data", "findings"]
    assert list(report["run"]) == [
        "name", "state", "cause", "started", "ended", "run_seconds", "steps", "world_size", "script", "python",
        "torch", "device", "record", "ranks",
    ]  # fmt: skip
    assert list(report["run"]["ranks"][0]) == [
        "rank", "state", "cause", "pid", "steps", "steps_per_second", "step_seconds", "data_share", "host_peak_bytes",
        "device_active_peak_bytes", "record",
    ]  # fmt: skip
    assert list(report["time"]) == [
        "steps", "batches", "seconds", "steps_per_second", "step_seconds", "phases", "evaluation_seconds",
        "evaluation_forwards", "epoch_start_seconds", "epoch_starts", "between_seconds",
    ]  # fmt: skip
    assert list(report["time"]["step_seconds"]) == ["p50", "p95", "p99"]
    assert list(report["time"]["phases"]) == ["data", "forward", "backward", "optimizer", "other"]
    assert list(report["memory"]) == [
        "host_resident_bytes", "host_peak_bytes", "host_in_use_bytes", "device_allocated_bytes",
        "device_active_peak_bytes", "device_reserved_bytes", "device_capacity_bytes", "alloc_retries", "ooms",
            "modules",
    ]  # fmt: skip
    assert list(report["findings"][0]) == [
        "rule", "severity", "summary", "evidence", "where", "fix", "gain", "gain_bound", "check",
    ]  # fmt: skip


def test_the_numbers_are_those_of_the_record(tmp_path: Path) -> None:
    write_run(tmp_path)
    time, memory = report_of(tmp_path)["time"], report_of(tmp_path)["memory"]
    assert time["steps"] == 200 and time["batches"] == 200
    assert time["seconds"] == pytest.approx(20.0) and time["steps_per_second"] == pytest.approx(10.0)
    assert time["step_seconds"]["p50"] == pytest.approx(0.1)
    assert time["phases"]["data"]["seconds"] == pytest.approx(6.0)
    assert time["phases"]["data"]["share"] == pytest.approx(0.3)
    assert math.fsum(spent["share"] or 0.0 for spent in time["phases"].values()) == pytest.approx(1.0)
    assert (time["evaluation_seconds"], time["epoch_start_seconds"], time["between_seconds"]) == (1.5, 0.2, 0.3)
    assert memory["host_peak_bytes"] == 512 << 20 and memory["device_active_peak_bytes"] is None


def test_what_was_never_seen_is_null_and_not_zero(tmp_path: Path) -> None:
    unwatched = {phase: spent for phase, spent in USUAL_STEP.items() if phase != "data"}
    write_run(tmp_path, step=unwatched, steps=20, values={HOST_PEAK.name: math.nan})
    report = report_of(tmp_path)
    assert report["time"]["phases"]["data"] == {"seconds": None, "share": None}
    assert report["time"]["step_seconds"] == {"p50": None, "p95": None, "p99": None}, "20 steps are too few"
    assert report["memory"]["host_peak_bytes"] is None
    assert "null" in json.dumps(report, allow_nan=False)


def test_a_record_that_holds_nothing_yet_makes_a_report(tmp_path: Path) -> None:
    write_run(tmp_path, steps=0, step={}, values={HOST_PEAK.name: math.nan}, state=State.CLEAN)
    report = report_of(tmp_path)
    assert report["time"]["steps_per_second"] is None and report["findings"] == []
    assert "not known" in on_terminal(report)
    assert "this run made 0" in on_terminal(report)


@pytest.mark.parametrize("size", [math.inf, -math.inf, 1e308])
def test_absurd_numbers_are_not_known(tmp_path: Path, size: float) -> None:
    write_run(tmp_path, values={HOST_PEAK.name: size})
    assert report_of(tmp_path)["memory"]["host_peak_bytes"] is None


@pytest.mark.parametrize(
    ("state", "name", "cause"),
    [
        (State.CLEAN, "clean", None),
        (State.EXCEPTION, "exception", "ended by an exception"),
        (State.DETACHED, "detached", None),
    ],
)
def test_the_state_says_how_the_run_ended(tmp_path: Path, state: State, name: str, cause: str | None) -> None:
    write_run(tmp_path, state=state)
    run = report_of(tmp_path)["run"]
    assert (run["state"], run["cause"]) == (name, cause)
    assert run["ended"] is not None


def test_a_cause_in_the_record_is_the_cause_of_the_report(tmp_path: Path) -> None:
    writer = write_run(tmp_path, state=None)
    writer.series(RANK_EXIT_INFO.name, cause="ValueError")
    writer.close(State.EXCEPTION)
    assert report_of(tmp_path)["run"]["cause"] == "ValueError"


def test_a_run_that_goes_on_is_running_and_one_that_is_gone_was_killed(tmp_path: Path) -> None:
    writer = write_run(tmp_path, state=None)
    snapshot = writer.snapshot()
    assert document([snapshot])["run"]["state"] == "running"
    gone = document([Snapshot(**{**vars(snapshot), "up": False})])
    assert gone["run"]["state"] == "killed" and gone["run"]["ended"] is None
    assert gone["findings"][0]["rule"] == "run-dead"
    writer.close(State.CLEAN)


# -- several ranks ----------------------------------------------------------------------------------------------------


def test_a_finding_of_several_ranks_is_said_once_with_its_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        magnitude = 60.0 + rank
        anomaly = ("debug-anomaly", "train.py:41", "", magnitude)
        write_run(tmp_path, rank=rank, world_size=3, observations=[anomaly] if rank else [])
    report = report_of(tmp_path)
    by_rule = {str(finding["rule"]): finding for finding in report["findings"]}
    assert by_rule["debug-anomaly"]["ranks"] == [1, 2]
    assert by_rule["data-workers-zero"]["ranks"] == [0, 1, 2]
    assert "ranks 1, 2" in on_terminal(report) and "all 3 ranks" in on_terminal(report)


def test_several_ranks_are_joined_by_mean_and_largest(tmp_path: Path) -> None:
    write_run(tmp_path, rank=0, world_size=2)
    write_run(tmp_path, rank=1, world_size=2, step={**USUAL_STEP, "data": 0.130}, values={HOST_PEAK.name: 2**31})
    report = report_of(tmp_path)
    assert report["time"]["phases"]["data"]["seconds"] == pytest.approx(16.0)
    assert report["time"]["step_seconds"]["p50"] == pytest.approx(0.2)
    assert report["memory"]["host_peak_bytes"] == 2**31
    assert [rank["data_share"] for rank in report["run"]["ranks"]] == [pytest.approx(0.3), pytest.approx(0.65)]


def test_the_run_is_in_the_most_alarming_state_of_its_ranks(tmp_path: Path) -> None:
    write_run(tmp_path, rank=0, world_size=2)
    write_run(tmp_path, rank=1, world_size=2, state=State.EXCEPTION)
    run = report_of(tmp_path)["run"]
    assert run["state"] == "exception" and run["cause"] == "rank 1: ended by an exception"


# -- which run --------------------------------------------------------------------------------------------------------


def test_the_latest_run_is_the_default_and_a_unique_prefix_will_do(tmp_path: Path) -> None:
    for name in ("alpha-1", "alpha-2", "beta"):
        write_run(tmp_path, name)
    assert find_run(tmp_path)[0].run == "beta"
    assert find_run(tmp_path, "alpha-1")[0].run == "alpha-1"
    assert find_run(tmp_path, "be")[0].run == "beta"


def test_an_exact_name_wins_over_longer_ones(tmp_path: Path) -> None:
    write_run(tmp_path, "alpha")
    write_run(tmp_path, "alpha-long")
    assert find_run(tmp_path, "alpha")[0].run == "alpha"


@pytest.mark.parametrize("name", ["gamma", "", "alpha"])
def test_an_unknown_or_ambiguous_name_says_what_there_is(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, "alpha-1")
    write_run(tmp_path, "alpha-2")
    with pytest.raises(RunError, match="alpha-2, alpha-1") as error:
        find_run(tmp_path, name)
    assert "\n" not in str(error.value)


def test_an_empty_directory_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gpuwatch\.attach\(model, loader\)"):
        find_run(tmp_path / "missing")


def test_of_two_starts_of_one_name_the_newest_is_reported_without_ranks_of_the_first(tmp_path: Path) -> None:
    old = [read(write_run(tmp_path, rank=rank, world_size=2, steps=50).path) for rank in range(2)]
    old = [Snapshot(**{**vars(rank), "created": rank.created - 1000, "ended": rank.created - 900}) for rank in old]
    new = read(write_run(tmp_path, rank=0, world_size=2, steps=70).path)
    assert [(rank.rank, rank.step) for rank in select_run([*old, new])] == [(0, 70)]


def test_a_rank_that_failed_while_another_was_starting_belongs_to_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, rank=1, world_size=2, state=State.EXCEPTION)
    write_run(tmp_path, rank=0, world_size=2)
    assert [rank.rank for rank in find_run(tmp_path)] == [0, 1]


def test_a_run_of_another_user_with_the_same_name_is_not_mixed_in(tmp_path: Path) -> None:
    mine = read(write_run(tmp_path, rank=0, world_size=2).path)
    other = read(write_run(tmp_path, rank=1, world_size=2).path)
    other = Snapshot(**{**vars(other), "uid": mine.uid + 1})
    assert len({rank.uid for rank in select_run([mine, other])}) == 1


# -- on a terminal ----------------------------------------------------------------------------------------------------


def test_the_terminal_shows_time_memory_and_every_part_of_a_finding(tmp_path: Path) -> None:
    write_run(tmp_path, observations=[GRAPHS], values={DEVICE_ACTIVE_PEAK.name: 3 << 30, DEVICE_CAPACITY.name: 4 << 30})
    text = on_terminal(report_of(tmp_path), width=200)
    for part in (
        "200 steps, 10 steps/s; a step: median 100 ms",
        "30 %",
        "host peak 512 MiB",
        "device peak 3 GiB, of 4 GiB",
        "2 findings",
        "1. WARN  Batches are loaded on the training thread  data-workers-zero",
        "where  losses, train.py:60",
        "fix    Keep numbers, not graphs",
        "gain   at most 1.43x as fast",
        "check  The data share",
    ):
        assert part in text, part


def test_nothing_is_wider_than_the_terminal_or_coloured_when_it_is_none(tmp_path: Path) -> None:
    write_run(tmp_path, "a-run-with-quite-a-long-name-" * 4, observations=[ANOMALY, GRAPHS])
    for width in (80, 60):
        text = on_terminal(document(find_run(tmp_path)), width=width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "\x1b" not in text


def test_an_ascii_terminal_gets_ascii_bars(tmp_path: Path) -> None:
    write_run(tmp_path)
    on_terminal(report_of(tmp_path), encoding="ascii").encode("ascii")


def test_text_from_a_record_cannot_steer_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path, NASTY, observations=[("debug-anomaly", NASTY, NASTY, 190.0)], identity={"script": NASTY})
    text = on_terminal(document(find_run(tmp_path)), width=200)
    assert "\x1b" not in text and "\x07" not in text
    assert text.count("<b>[bold]&amp;</b>") == 4, "and it is shown as it is written"


# -- as HTML ----------------------------------------------------------------------------------------------------------


class _Seen(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_self_contained_and_escapes_what_it_shows(tmp_path: Path) -> None:
    nasty = NASTY + "<script>alert(1)</script>"
    write_run(tmp_path, nasty, observations=[("debug-anomaly", nasty, nasty, 190.0)], identity={"script": nasty})
    seen = _Seen()
    seen.feed(page(document(find_run(tmp_path))))
    assert not {"script", "link", "img", "iframe", "b"} & set(seen.tags)
    assert seen.text.count("<script>alert(1)</script>") == 5, "title, heading, facts, where, evidence"
    assert "\x1b" not in seen.text and "Anomaly detection is on" in seen.text


def test_the_page_has_bars_ranks_and_findings(tmp_path: Path) -> None:
    for rank in range(2):
        write_run(tmp_path, rank=rank, world_size=2)
    text = page(report_of(tmp_path))
    assert "width: 30.0%" in text and "<h2>Ranks</h2>" in text and "all 2 ranks" in text


# -- at the end of a run ----------------------------------------------------------------------------------------------


def test_the_summary_says_speed_time_memory_and_each_finding_in_two_lines(tmp_path: Path) -> None:
    writer = write_run(tmp_path, observations=[GRAPHS], state=None)
    lines = summary_lines(writer.snapshot())
    assert lines[0] == "gpuwatch: train: 200 steps, 10 steps/s; a step: median 100 ms, p95 100 ms, p99 100 ms"
    assert lines[1] == "  time: data 30 %, forward 20 %, backward 40 %, optimizer 5.0 %, other 5.0 %"
    assert lines[2].startswith("  memory: host peak 512 MiB")
    assert [line.split(":")[0].strip() for line in lines[3:7]] == ["warn", "fix", "warn", "fix"]
    assert lines[5].endswith("a list of 150 tensors (losses, train.py:60)")
    assert lines[-1] == "  the whole report: gpuwatch report train"
    writer.close(State.CLEAN)


def test_the_summary_of_a_run_that_made_no_step_is_short(tmp_path: Path) -> None:
    writer = write_run(tmp_path, "my run", steps=0, step={}, state=None, values={HOST_PEAK.name: math.nan})
    writer.words[Word.STEP_TIME] = 0
    lines = summary_lines(writer.snapshot())
    assert lines[0] == "gpuwatch: my run: 0 steps" and lines[-1].endswith("gpuwatch report 'my run'")
    writer.close(State.CLEAN)


def test_the_summary_loads_nothing_heavy() -> None:
    program = (
        "import sys, gpuwatch.report.summary;"
        "print(sorted({'rich', 'torch', 'numpy', 'prometheus_client', 'http', 'xml', 'argparse'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
