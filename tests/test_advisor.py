"""Findings: which, in which order, in which words."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gpuwatch.advisor import advise, advise_gpu, fill, firing, severity_of, spoken
from gpuwatch.catalog import GPU_THROTTLED, GPU_UTILIZATION, HOST_PEAK, LOADER_ITEM_SECONDS
from gpuwatch.layout import State
from gpuwatch.reader import read
from gpuwatch.rulebook import RULES, RULES_BY_ID
from tests.recorded import USUAL_STEP, row, write_run

ANOMALY = ("debug-anomaly", "train.py:41", "", 190.0)
ZEROS = ("opt-zero-grad-inplace", "train.py:52", "", 64.0)
GRAPHS = ("leak-graph-retained", "losses, train.py:60", "a list of 150 tensors", 150.0)
NEVER_ZEROED = ("opt-grads-not-zeroed", "train.py:52", "", 80.0)


def test_a_run_without_faults_has_no_findings(tmp_path: Path) -> None:
    fed = {**USUAL_STEP, "data": 0.001}
    assert advise(read(write_run(tmp_path, step=fed).path)) == []


def test_findings_come_by_severity_and_then_by_the_gain_they_can_bring(tmp_path: Path) -> None:
    writer = write_run(tmp_path, observations=[ZEROS, GRAPHS, ANOMALY, NEVER_ZEROED])
    findings = advise(read(writer.path))
    assert [finding.rule for finding in findings] == [
        "opt-grads-not-zeroed",
        "debug-anomaly",
        "data-workers-zero",
        "leak-graph-retained",
        "opt-zero-grad-inplace",
    ]
    assert [finding.severity for finding in findings] == ["critical", "warn", "warn", "warn", "info"]


def test_a_finding_speaks_with_this_runs_own_numbers(tmp_path: Path) -> None:
    writer = write_run(tmp_path, observations=[GRAPHS], values={LOADER_ITEM_SECONDS.name: 0.0009})
    workers, graphs = advise(read(writer.path))
    assert "30 % of step time goes into loading: 30 ms of 100 ms (medians); an item takes 900 us" in workers.evidence
    assert workers.gain_bound == pytest.approx(1 / 0.7)
    assert workers.gain.startswith("at most 1.43x as fast: ")
    assert graphs.evidence.startswith("the graphs of about 150 steps") and graphs.evidence.endswith(
        "; a list of 150 tensors"
    )
    assert graphs.where == "losses, train.py:60"
    assert graphs.gain_bound is None


def test_the_place_with_the_largest_magnitude_is_the_one_named(tmp_path: Path) -> None:
    seen = [("debug-anomaly", "a.py:1", "", 60.0), ("debug-anomaly", "b.py:2", "", 190.0)]
    finding = advise(read(write_run(tmp_path, step={"forward": 0.1}, observations=seen).path))[0]
    assert finding.where == "b.py:2" and "190 training steps" in finding.evidence


def test_the_consequence_of_another_finding_is_left_out(tmp_path: Path) -> None:
    stalled = write_run(tmp_path, "workers-zero")
    assert "data-stall" in RULES_BY_ID["data-workers-zero"].suppresses
    assert [finding.rule for finding in advise(read(stalled.path))] == ["data-workers-zero"]


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "other"])
def test_slow_steps_follow_from_a_slow_loader_only_where_it_may_be_waited_for(phase: str, tmp_path: Path) -> None:
    writer = write_run(tmp_path, state=None)
    for number in range(201, 401):
        slow = {**USUAL_STEP, phase: 0.5} if number % 8 == 0 else USUAL_STEP
        writer.step_row(*row(number, number * 0.1, slow))
    writer.close(State.CLEAN)
    told = {finding.rule: finding.where for finding in advise(read(writer.path))}
    apart = {} if phase in ("data", "backward") else {"comp-step-jitter": f"phase: {phase}"}
    assert told == {"data-workers-zero": "", **apart}


def test_a_killed_run_is_reported_as_that_alone(tmp_path: Path) -> None:
    writer = write_run(tmp_path, state=None)
    snapshot = writer.snapshot()
    assert "run-dead" not in [finding.rule for finding in advise(snapshot)]
    dead = type(snapshot)(**{**vars(snapshot), "up": False})
    found = {finding.rule: finding for finding in advise(dead)}
    assert "its last completed step is 200" in found["run-dead"].evidence
    assert "data-workers-zero" not in found
    writer.close(State.CLEAN)


def test_a_signal_that_is_missing_makes_a_rule_abstain(tmp_path: Path) -> None:
    # without a watched loader neither its workers nor the wait are known
    unwatched = {phase: spent for phase, spent in USUAL_STEP.items() if phase != "data"}
    writer = write_run(tmp_path, step=unwatched)
    assert advise(read(writer.path)) == []
    assert severity_of(RULES_BY_ID["data-workers-zero"], {}) is None


def test_jitter_names_the_phase_that_grows(tmp_path: Path) -> None:
    writer = write_run(tmp_path, step={**USUAL_STEP, "data": 0.001}, state=None)
    slow = {**USUAL_STEP, "data": 0.001, "optimizer": 0.5}
    for number in range(201, 231):
        writer.step_row(*row(number, number * 0.1, slow))
    found = {finding.rule: finding for finding in advise(writer.snapshot())}
    assert found["comp-step-jitter"].where == "phase: optimizer"
    assert found["comp-step-jitter"].evidence.endswith("; it is optimizer")


def test_rules_on_hardware_are_for_gpus_only() -> None:
    ten_minutes = [(60.0 * minute, 1.0) for minute in range(10)]
    hot = {GPU_THROTTLED.name: ten_minutes, GPU_UTILIZATION.name: ten_minutes}
    findings = advise_gpu(hot, "GPU 3")
    assert [finding.rule for finding in findings] == ["hw-thermal-throttle"]
    assert findings[0].where == "GPU 3"
    assert firing(hot, [rule for rule in RULES if rule.scope == "rank"]) == []


def test_a_finding_as_data_has_the_fields_of_the_report(tmp_path: Path) -> None:
    finding = advise(read(write_run(tmp_path, observations=[ZEROS]).path))[-1]
    assert list(finding.as_dict()) == [
        "rule", "severity", "summary", "evidence", "where", "fix", "gain", "gain_bound", "check",
    ]  # fmt: skip


def test_braces_that_are_no_quantity_stay_as_they_are() -> None:
    assert fill("{share} of {step}; write `{'a': 1}` or {unknown}", {"share": "30 %", "step": "1 s"}) == (
        "30 % of 1 s; write `{'a': 1}` or {unknown}"
    )


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0.124, "seconds", "124 ms"),
        (0.0000005, "seconds", "0.5 us"),
        (0.0, "seconds", "0 us"),
        (7200.0, "seconds", "2 h"),
        (0.3, "ratio", "30 %"),
        (0.034, "ratio", "3.4 %"),
        (1536.0, "bytes", "1.5 KiB"),
        (1234567.0, "count", "1,234,567"),
        (2.5, "count", "2.5"),
        (1.41e9, "hertz", "1.41 GHz"),
        (None, "count", "an unknown number of"),
        (None, "seconds", "an unknown time"),
    ],
)
def test_numbers_are_said_as_a_person_reads_them(number: float | None, unit: str, text: str) -> None:
    assert spoken(number, unit) == text


@pytest.mark.parametrize("size", [math.inf, 1e300, -5.0])
def test_an_absurd_size_in_a_record_does_not_stop_the_advice(tmp_path: Path, size: float) -> None:
    writer = write_run(tmp_path, values={HOST_PEAK.name: size})
    assert [finding.rule for finding in advise(read(writer.path))] == ["data-workers-zero"]
