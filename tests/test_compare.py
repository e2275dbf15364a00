"""Two runs side by side: what is said to have changed has changed, and noise is not."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuwatch.catalog import DEVICE_ACTIVE_PEAK, HOST_PEAK, LOADER_WORKERS
from gpuwatch.cli import main
from gpuwatch.layout import State
from gpuwatch.limits import REGRESSION_MEMORY_RATIO, REGRESSION_STEP_RATIO, REGRESSION_WAIT_POINTS
from gpuwatch.report import bootstrap
from gpuwatch.report.comparison import compare
from gpuwatch.report.runs import find_run
from tests.recorded import USUAL_STEP, write_run
from tests.test_cli import one_line


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command looks for records."""
    monkeypatch.setenv("GPUWATCH_DIR", str(tmp_path))
    return tmp_path


def step(**seconds: float) -> Mapping[str, float]:
    """The usual step, some phases of it longer."""
    return {**USUAL_STEP, **seconds}


class TestBootstrap:
    def test_the_interval_holds_the_true_ratio_of_noisy_steps(self) -> None:
        draw = random.Random(3)
        held = 0
        for _ in range(20):
            before = [draw.gauss(1.0, 0.1) for _ in range(200)]
            after = [draw.gauss(1.05, 0.1) for _ in range(200)]
            ratio = bootstrap.median_ratio(before, after)
            assert ratio is not None
            held += ratio.low <= 1.05 <= ratio.high
        assert held >= 17  # 19 of 20 on average

    def test_neighbours_that_are_alike_widen_the_interval(self) -> None:
        draw = random.Random(5)
        slow = [1.0 + 0.1 * (number // 50 % 2) + draw.gauss(0, 0.005) for number in range(1000)]
        shuffled = draw.sample(slow, len(slow))
        wide, narrow = bootstrap.median(slow), bootstrap.median(shuffled)
        assert wide is not None and narrow is not None
        assert wide.high - wide.low >= narrow.high - narrow.low

    def test_the_same_records_give_the_same_answer(self) -> None:
        numbers = [random.Random(1).random() for _ in range(100)]
        assert bootstrap.median(numbers) == bootstrap.median(numbers)

    def test_without_steps_nothing_is_said(self) -> None:
        assert bootstrap.median([]) is None
        assert bootstrap.median_ratio([], [1.0]) is None
        assert bootstrap.median_ratio([0.0], [1.0]) is None


class TestComparison:
    def compared(self, records: Path, **after: object) -> dict[str, object]:
        write_run(records, "old")
        write_run(records, "new", **after)  # type: ignore[arg-type]
        return dict(compare(find_run(records, "old"), find_run(records, "new")))

    def test_a_slower_forward_is_a_regression_that_names_the_phase(self, records: Path) -> None:
        comparison = self.compared(records, step=step(forward=0.040))
        sentence = str(comparison["regressions"])
        assert "1.20 times" in sentence and "most of it in forward (+20 ms)" in sentence

    @pytest.mark.parametrize(
        ("ratio", "worse"), [(REGRESSION_STEP_RATIO + 0.01, True), (REGRESSION_STEP_RATIO - 0.01, False)]
    )
    def test_the_limit_on_step_time_is_that_of_the_rule(self, records: Path, ratio: float, worse: bool) -> None:
        longer = {phase: seconds * ratio for phase, seconds in USUAL_STEP.items()}
        assert bool(self.compared(records, step=longer)["regressions"]) is worse

    @pytest.mark.parametrize("metric", [HOST_PEAK, DEVICE_ACTIVE_PEAK])
    def test_a_larger_peak_is_a_regression(self, records: Path, metric: object) -> None:
        name = metric.name  # type: ignore[attr-defined]
        write_run(records, "old", values={name: 100e6})
        write_run(records, "bit", values={name: 100e6 * (REGRESSION_MEMORY_RATIO - 0.01)})
        write_run(records, "lot", values={name: 100e6 * (REGRESSION_MEMORY_RATIO + 0.01)})
        old = find_run(records, "old")
        assert compare(old, find_run(records, "bit"))["regressions"] == []
        (sentence,) = compare(old, find_run(records, "lot"))["regressions"]
        assert sentence.endswith("1.11 times")

    def test_a_larger_share_of_waiting_is_a_regression_also_when_steps_are_shorter(self, records: Path) -> None:
        waits = 0.030 * (1 + 3 * REGRESSION_WAIT_POINTS)
        comparison = self.compared(records, step=step(data=waits, backward=0.020))
        assert comparison["step_seconds"]["verdict"] == "faster"  # type: ignore[index]
        sentence = str(comparison["regressions"])
        assert "waits for data" in sentence

    def test_the_same_wait_of_a_shorter_step_is_none(self, records: Path) -> None:
        comparison = self.compared(records, step=step(backward=0.020))
        assert comparison["step_seconds"]["verdict"] == "faster"  # type: ignore[index]
        assert comparison["regressions"] == []

    def test_noise_is_no_regression(self, records: Path) -> None:
        draw = random.Random(7)
        for name in ("old", "new"):
            write_run(records, name, step=step(forward=0.02 + draw.random() * 0.002))
        assert compare(find_run(records, "old"), find_run(records, "new"))["regressions"] == []

    def test_too_few_steps_are_not_compared(self, records: Path) -> None:
        comparison = self.compared(records, steps=20, step=step(forward=0.1))
        assert comparison["step_seconds"]["verdict"] == "not known"  # type: ignore[index]
        assert comparison["regressions"] == []
        assert comparison["not_compared"] == [
            "step time: new has 20 steps, 10 of which count; 40 are needed, after 10 to warm up"
        ]

    @pytest.mark.parametrize(("state", "words"), [(State.EXCEPTION, "ended by an exception"), (None, "gone without")])
    def test_a_run_that_broke_off_is_worse_than_one_that_did_not(
        self, state: State | None, words: str, records: Path
    ) -> None:
        comparison = self.compared(records, state=state)
        sentence = str(comparison["regressions"])
        assert sentence.startswith("['it broke off after 200 steps: ") and words in sentence
        both = compare(find_run(records, "new"), find_run(records, "new"))
        assert both["regressions"] == [] and both["same_run"]

    def test_settings_that_differ_are_named_and_others_are_not(self, records: Path) -> None:
        comparison = self.compared(records, values={LOADER_WORKERS.name: 4}, identity={"torch": "2.12.0"})
        assert comparison["settings"] == [
            {"name": "torch", "before": "2.13.0+cpu", "after": "2.12.0"},
            {"name": "loader workers", "before": "0", "after": "4"},
        ]

    def test_findings_are_new_gone_or_kept(self, records: Path) -> None:
        anomaly = ("debug-anomaly", "train.py:3", "", 100.0)
        deterministic = ("debug-deterministic-fill", "train.py:4", "", 100.0)
        write_run(records, "old", observations=[anomaly])
        write_run(records, "new", observations=[deterministic])
        findings = compare(find_run(records, "old"), find_run(records, "new"))["findings"]
        assert [finding["rule"] for finding in findings["new"]] == ["debug-deterministic-fill"]
        assert [finding["rule"] for finding in findings["gone"]] == ["debug-anomaly"]
        assert "data-workers-zero" in [finding["rule"] for finding in findings["kept"]]


class TestCommand:
    def test_it_says_what_got_slower_and_fails_only_when_asked_to(
        self, records: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_run(records, "old")
        write_run(records, "new", step=step(forward=0.040))
        assert main(["compare", "old", "new"]) == 0
        shown = capsys.readouterr().out
        assert "Step time: slower" in shown and "Regressions" in shown and "+100.0 %" in shown
        assert main(["compare", "old", "new", "--fail-on-regression"]) == 1
        assert main(["compare", "new", "old", "--fail-on-regression"]) == 0

    def test_what_cannot_be_judged_has_not_passed(self, records: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_run(records, "old")
        write_run(records, "short", steps=20)
        assert main(["compare", "old", "short"]) == 0
        assert "No regression in what can be compared." in capsys.readouterr().out
        assert main(["compare", "old", "short", "--fail-on-regression"]) == 2
        assert "cannot judge: step time: short has 20 steps" in capsys.readouterr().err

    def test_json_has_the_same_content(self, records: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_run(records, "old")
        write_run(records, "new")
        assert main(["compare", "old", "new", "--json"]) == 0
        comparison = json.loads(capsys.readouterr().out)
        assert comparison["step_seconds"]["ratio"] == pytest.approx(1.0)
        assert comparison["step_seconds"]["verdict"] == "no difference"

    def test_a_record_kept_elsewhere_is_compared_by_its_file(
        self, records: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
    ) -> None:
        kept = write_run(tmp_path_factory.mktemp("kept"), "old").path
        write_run(records, "new")
        assert main(["compare", str(kept), "new", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["before"] == "old"

    def test_what_is_not_there_is_said_in_one_line(self, records: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_run(records, "old")
        assert main(["compare", "old", "absent"]) == 2
        assert "no run 'absent'" in one_line(capsys)
        assert main(["compare", "old", str(records / "absent.gpw")]) == 2
        assert "no record" in one_line(capsys)
        assert main(["compare", "old", str(records)]) == 2
        assert "expected the name of a run or a file" in one_line(capsys)
        (records / "broken.gpw").write_bytes(b"nonsense")
        assert main(["compare", str(records / "broken.gpw"), "old"]) == 2
        assert "broken.gpw" in one_line(capsys)

    def test_markup_in_a_record_is_text(self, records: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_run(records, "old", identity={"torch": "[/] [bold]2.13 :smile:"})
        write_run(records, "new", identity={"torch": "[red]2.13"})
        assert main(["compare", "old", "new"]) == 0
        shown = capsys.readouterr().out
        assert "[/] [bold]2.13 :smile:" in shown and "[red]2.13" in shown
