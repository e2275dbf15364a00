"""The demo: each planted fault is found, and only while it is planted. Real runs of the training script."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.progress import Progress

from gpuwatch.cli import main
from gpuwatch.demo import FAULTS, DemoError, Fault, Outcome, Training
from gpuwatch.reader import read_all
from gpuwatch.report.document import document
from gpuwatch.report.runs import find_run
from gpuwatch.rulebook import RULES_BY_ID
from gpuwatch_hooks import demo_training

ROOT = Path(__file__).parents[1]
STEPS = 110
"""Enough for every detector: the slowest has counted by step 92."""
NAMES = [fault.name for fault in FAULTS]
PLANTED = {fault.rule for fault in FAULTS}
DEPENDS_ON_MACHINE = {"comp-step-jitter", "data-io-bound"}
"""What a run may rightly have, whatever was planted: on a shared machine steps differ, and where steps are quick the
script's slow storage takes more of them than one worker could hide."""


def rules_of(outcome: Outcome) -> set[str]:
    return {str(finding["rule"]) for finding in outcome.report["findings"]} - DEPENDS_ON_MACHINE


@pytest.fixture(scope="module")
def quiet_bars() -> Iterator[Progress]:
    with Progress(disable=True) as bars:
        yield bars


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The whole command, once, with its records kept."""
    records = tmp_path_factory.mktemp("demo") / "records"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'hooks'}", "GPUWATCH_DIR": str(records)}
    command = [sys.executable, "-m", "gpuwatch", "demo", "--steps", str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    return done, records


@pytest.fixture(scope="module")
def without_each(tmp_path_factory: pytest.TempPathFactory, quiet_bars: Progress) -> dict[str, Outcome]:
    """A run without each of the faults, two at a time."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("GPUWATCH_DIR", str(tmp_path_factory.mktemp("records")))

        def outcome(name: str) -> Outcome:
            training = Training(tmp_path_factory.mktemp(name), STEPS)
            return training.run(f"without-{name}", [name], quiet_bars, f"without {name}")

        return dict(zip(NAMES, pool.map(outcome, NAMES), strict=True))


def test_the_demo_ends_well_and_shows_both_reports_and_the_comparison(
    shown: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = shown
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"gpuwatch: training with planted faults, {STEPS} steps",
        f"gpuwatch: training with the advice applied, {STEPS} steps",
    ]
    assert "gpuwatch: demo-planted" in done.stdout and "gpuwatch: demo-repaired" in done.stdout
    table = done.stdout.partition("before and after")[2]
    for heading in ("training speed", "median step", "waiting for data", "peak host memory", "findings", "gone: "):
        assert heading in table
    assert re.search(r"loss at the last step +(\S+) +\1 +the same", table), "the advice changes no result"


def test_every_planted_fault_is_found(shown: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, records = shown
    found = {str(finding["rule"]) for finding in document(find_run(records, "demo-planted"))["findings"]}
    assert found - DEPENDS_ON_MACHINE == PLANTED


def test_with_the_advice_applied_nothing_is_left(shown: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, records = shown
    report = document(find_run(records, "demo-repaired"))
    left = {str(finding["rule"]) for finding in report["findings"] if finding["severity"] != "info"}
    assert left <= DEPENDS_ON_MACHINE


def test_the_advice_makes_the_run_faster_and_smaller(shown: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, records = shown
    before, after = (document(find_run(records, name)) for name in ("demo-planted", "demo-repaired"))
    assert before["time"]["steps"] == after["time"]["steps"] == STEPS
    slow, fast = before["time"]["steps_per_second"], after["time"]["steps_per_second"]
    large, small = before["memory"]["host_peak_bytes"], after["memory"]["host_peak_bytes"]
    assert slow is not None and fast is not None and fast > slow
    assert large is not None and small is not None and large > small


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_without_a_planted_fault_its_finding_is_gone_and_the_others_stay(
    without_each: dict[str, Outcome], fault: Fault
) -> None:
    assert rules_of(without_each[fault.name]) == PLANTED - {fault.rule}


def test_the_script_and_the_command_agree_on_the_faults() -> None:
    assert tuple(NAMES) == demo_training.FAULTS
    assert set(RULES_BY_ID) >= PLANTED


def test_findings_name_lines_of_the_script(without_each: dict[str, Outcome]) -> None:
    by_rule = {str(finding["rule"]): finding for finding in without_each["anomaly"].report["findings"]}
    place = re.match(r"demo_training\.py:(\d+)", str(by_rule["eval-grad-enabled"]["where"]))
    assert place is not None
    line = Path(demo_training.__file__).read_text("utf-8").splitlines()[int(place[1]) - 1]
    assert "model(" in line


def test_without_torch_the_demo_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert importlib.util.find_spec("torch") is None
    assert main(["demo"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == "gpuwatch: the demo trains a model and needs torch: pip install torch\n"


def test_a_run_that_fails_is_shown_with_what_it_said(
    tmp_path: Path, records: Path, quiet_bars: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, 1)
    training.script.write_text("raise ArithmeticError('the script broke')\n", "utf-8")
    with pytest.raises(DemoError, match="ended with status 1"):
        training.run("broken", [], quiet_bars, "that breaks")
    assert "ArithmeticError: the script broke" in capsys.readouterr().err


def test_a_run_that_leaves_no_record_is_an_error_and_not_an_empty_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_bars: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUWATCH_DIR", str(tmp_path / "records"))
    training = Training(tmp_path, 1)
    training.script.write_text("print('watched by nobody')\n", "utf-8")
    with pytest.raises(DemoError, match="left no record"):
        training.run("unwatched", [], quiet_bars, "that attaches nothing")


def test_ctrl_c_ends_the_demo_and_its_run(tmp_path: Path) -> None:
    records = tmp_path / "records"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'hooks'}", "GPUWATCH_DIR": str(records)}
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuwatch", "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    try:
        deadline = time.monotonic() + 120
        while not (running := [run for run in read_all(records)[0] if run.step > 0]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert running and running[0].up
        process.send_signal(signal.SIGINT)  # to the command alone: it has to end its run
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert not find_run(records)[0].up
