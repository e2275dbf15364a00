"""What is rendered from the rulebook: alerts that promtool accepts, texts that say what the rules say."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from gpuwatch.expr import BinOp, Const, Quantity
from gpuwatch.render.alerts import alert_rules, alerts_of, texts
from gpuwatch.render.cases import Case, cases_of, owner
from gpuwatch.render.conditions import limit, promql, recorded, shown
from gpuwatch.render.promtool import notation, promtool_tests
from gpuwatch.render.readme import BEGIN, END, rule_table, with_table
from gpuwatch.render.runbooks import runbook
from gpuwatch.render.template import humanized, spoken, template
from gpuwatch.rulebook import RECORDS, RULES, RULES_BY_ID, Example, Rule
from tests.promtool import promtool
from tools import render

ROOT = Path(__file__).resolve().parent.parent
STALL = RULES_BY_ID["data-stall"]


def tried(rules: list[Rule], directory: Path, tests_of: list[Rule] | None = None) -> subprocess.CompletedProcess[str]:
    """The alerts of some rules, tried by promtool on the cases of (other versions of) them."""
    (directory / "gpuwatch.rules.yaml").write_text(alert_rules(rules), encoding="utf-8")
    (directory / "gpuwatch.test.yaml").write_text(promtool_tests(tests_of or rules), encoding="utf-8")
    return promtool(directory, "test", "rules", "gpuwatch.test.yaml")


class Ahead:
    """Each rule tried by itself, while the next ones are under way."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.directory = directory
        self.pool = pool
        self.begun: dict[str, Future[subprocess.CompletedProcess[str]]] = {}

    def tried(self, rule: Rule) -> subprocess.CompletedProcess[str]:
        """What came of this one."""
        first = RULES.index(rule)
        for each in RULES[first : first + 3]:
            if each.id not in self.begun:
                place = self.directory / each.id
                place.mkdir()
                self.begun[each.id] = self.pool.submit(tried, [each], place)
        return self.begun[rule.id].result()


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    with ThreadPoolExecutor(2) as pool:
        yield Ahead(tmp_path_factory.mktemp("rules"), pool)


@functools.cache
def made(id: str) -> tuple[Case, ...]:
    """The cases of a rule, for several tests."""
    return tuple(cases_of(RULES_BY_ID[id]))


# -- promtool ----------------------------------------------------------------------------------------------------------


@pytest.mark.debian
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
class TestByPromtool:
    def test_it_accepts_the_rules(self) -> None:
        done = promtool(ROOT / "alerts", "check", "rules", "gpuwatch.rules.yaml")
        assert done.returncode == 0, done.stdout + done.stderr
        count = len(recorded(RULES)) + len(RECORDS) + sum(len(alerts_of(rule)) for rule in RULES)
        assert f"{count} rules found" in done.stdout

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
    def test_every_case_comes_out_as_the_python_reading_says(self, rule: Rule, ahead: Ahead) -> None:
        # Each rule by itself: promtool evaluates every alert of a file at every minute of every case.
        done = ahead.tried(rule)
        assert done.returncode == 0, (done.stdout + done.stderr)[:4000]

    def test_the_stories_come_out_as_they_are_told(self) -> None:
        done = promtool(ROOT / "alerts", "test", "rules", "extra.test.yaml")
        assert done.returncode == 0, (done.stdout + done.stderr)[:4000]

    def test_a_mistake_in_the_promql_reading_alone_is_noticed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        assert tried([STALL], tmp_path).returncode == 0
        right = BinOp.promql
        monkeypatch.setattr(BinOp, "promql", lambda self: right(self).replace(" / ", " * "))
        done = tried([STALL], tmp_path)
        assert done.returncode == 1
        assert "alertname: GpuwatchDataStall" in done.stdout + done.stderr

    def test_a_mistake_in_the_python_reading_alone_is_noticed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(Const, "value", lambda self, history: self.number * 1.3)
        assert tried([STALL], tmp_path).returncode == 1

    def test_numbers_and_hostile_texts_come_out_as_expected(self, tmp_path: Path) -> None:
        units = ("ratio", "seconds", "bytes", "hertz", "celsius", "count", "else")
        thermal = RULES_BY_ID["hw-thermal-throttle"]
        rules = [
            dataclasses.replace(
                thermal,
                id=f"unit-{unit}-{index}",
                because='It says `{{ .Values }}` and {not this}, 100 % of "it": that\'s\tall.',
                when=Const(scale) * thermal.value.expr > 0,
                value=Quantity("share", Const(scale) * thermal.value.expr, unit),
                examples=_one_of_each(thermal),
            )
            for index, scale in enumerate((1.0, 0.00123, 61.5, 3_700.0, 200_000.0, 23_456_789_012.0))
            for unit in units
        ]
        cases = [yaml.safe_load(promtool_tests([rule]))["tests"][0] for rule in rules]
        moments = [case["alert_rule_test"][-1] for case in cases]
        tests = [{"interval": "1m", "input_series": cases[0]["input_series"], "alert_rule_test": moments}]
        (tmp_path / "gpuwatch.rules.yaml").write_text(alert_rules(rules), encoding="utf-8")
        body = {"rule_files": ["gpuwatch.rules.yaml"], "evaluation_interval": "1m", "tests": tests}
        (tmp_path / "units.test.yaml").write_text(yaml.safe_dump(body), encoding="utf-8")
        done = promtool(tmp_path, "test", "rules", "units.test.yaml")
        assert done.returncode == 0, (done.stdout + done.stderr)[:4000]


def _one_of_each(rule: Rule) -> tuple[Example, ...]:
    return tuple(next(example for example in rule.examples if example.fires is fires) for fires in (True, False))


# -- alerts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_an_alert_says_all_that_its_rule_says(rule: Rule) -> None:
    for alert in alerts_of(rule):
        assert alert.labels["rule"] == rule.id
        assert alert.labels["severity"] in ("info", "warning", "critical")
        assert alert.annotations["summary"].startswith(rule.title)
        assert alert.annotations["description"].startswith(rule.because)
        assert alert.annotations["fix"] == rule.fix
        assert rule.gain.text in alert.annotations["gain"]
        assert alert.annotations["check"] == rule.check
        assert alert.annotations["runbook_url"] == f"alerts/runbooks/{rule.id}.md"
        assert ("$labels.where" in alert.annotations["description"]) is rule.observed


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_value_of_an_alert_is_the_number_of_its_rule(rule: Rule) -> None:
    text = promql(rule, rule.when)
    assert shown(rule.when) == {rule.value.expr} or text.startswith(f"({rule.value.expr.promql()})\nand on")
    # otherwise the alert would ask for a signal that the rule does not need
    assert rule.value.expr.metrics() <= rule.when.metrics()


def test_a_fix_that_an_alert_cannot_fill_is_refused() -> None:
    rule = dataclasses.replace(STALL, fix="Pass `num_workers={workers}`.")
    with pytest.raises(ValueError, match=r"rule data-stall: the fix names \['workers'\]"):
        texts(rule, template())


def test_the_critical_alert_comes_first_so_that_the_warning_sees_it() -> None:
    critical, warning = alerts_of(STALL)
    assert (critical.labels["severity"], warning.labels["severity"]) == ("critical", "warning")
    assert critical.name == warning.name
    assert f'ALERTS{{alertname="{STALL.alert}"' in warning.expr


def test_a_place_is_named_where_there_is_one() -> None:
    rule = RULES_BY_ID["debug-anomaly"]
    labels = dict(owner(rule))
    assert "Seen at" not in texts(rule, spoken(labels, 60.0))["description"]
    assert texts(rule, spoken({**labels, "where": "train.py:12"}, 60.0))["description"].endswith(
        "Measured: 60 (steps). Seen at train.py:12."
    )


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (1 / 3, "ratio", "33.33%"),
        (0.0, "seconds", "0s"),
        (0.0125, "seconds", "12.5ms"),
        (3.0, "seconds", "3s"),
        (720.0, "seconds", "12m 0s"),
        (200_000.0, "seconds", "2d 7h 33m 20s"),
        (3 * 2.0**30, "bytes", "3GiB"),
        (1.98e9, "hertz", "1.98GHz"),
        (71.4, "celsius", "71 °C"),
        (1234.5, "count", "1234"),
        (1e-26, "seconds", "0.01ys"),
    ],
)
def test_numbers_are_said_as_prometheus_says_them(number: float, unit: str, text: str) -> None:
    assert humanized(number, unit) == text


def test_the_limit_of_joined_conditions_is_where_the_rule_can_first_fire() -> None:
    assert limit(STALL.when, STALL.value.expr) == 0.10
    assert STALL.critical_when is not None and limit(STALL.critical_when, STALL.value.expr) == 0.25
    pause = RULES_BY_ID["comp-gc-pause"]
    assert limit(pause.when, pause.value.expr) == 0.01
    assert limit(STALL.when, pause.value.expr) is None


# -- promtool's test file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.0, 20.0, 40.0), "0+20x2"),
        ((3.0, 2.0, 1.0), "3-1x2"),
        ((0.5,), "0.5"),
        ((1.0, 5.0, 2.0), "1 5 2"),
        ((0.0, 0.1, 0.2, 0.3), "0 0.1 0.2 0.3"),  # adding 0.1 three times gives another number
        ((math.nan, 1.0, math.nan, math.nan), "_ 1 stale _"),
        ((8e-06, 8e-06), "8e-06+0x1"),
    ],
)
def test_series_are_written_in_promtools_notation(values: tuple[float, ...], text: str) -> None:
    assert notation(values) == text


def test_an_example_shorter_than_the_hold_is_refused() -> None:
    rule = dataclasses.replace(STALL, hold_minutes=60)
    with pytest.raises(ValueError, match=r"example 'a sampler that .*': fires nowhere in its 10 minutes"):
        list(cases_of(rule))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_has_the_made_cases_beside_its_examples(rule: Rule) -> None:
    names = [case.name for case in made(rule.id)]
    assert len(set(names)) == len(names)
    assert names[: len(rule.examples)] == [example.name for example in rule.examples]
    if not promql(rule, rule.when).endswith(">= 0"):  # an observation of any size has no edge
        assert any(", just " in name for name in names) and any(", not quite " in name for name in names)
    assert any(", beside " in name for name in names)
    assert any(", then " in name for name in names)


def test_the_made_cases_expect_both_alerts_and_silence() -> None:
    outcomes = {bool(fired) for rule in RULES for case in made(rule.id) for fired in case.expected.values()}
    assert outcomes == {True, False}


# -- pages and files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_runbook_says_what_to_do_and_what_it_is_not(rule: Rule) -> None:
    page = runbook(rule)
    for text in (rule.title, rule.because, rule.fix, rule.check, rule.alert, promql(rule, rule.when)):
        assert text in page
    for example in rule.examples:
        assert example.fires or example.name[1:] in page
    for id in rule.suppresses:
        assert f"{id}.md" in page
    assert "*{" not in page and "{}" not in page
    assert "\n\n\n" not in page and page.endswith("\n") and not page.endswith("\n\n")


def test_the_table_of_rules_links_every_runbook_and_is_put_between_the_markers() -> None:
    table = rule_table(RULES)
    assert all(f"(alerts/runbooks/{rule.id}.md)" in table for rule in RULES)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in table.splitlines())
    readme = with_table(f"# Title\n{BEGIN}\nold\n{END}\nrest\n", RULES)
    assert readme == f"# Title\n{BEGIN}\n{table}{END}\nrest\n"
    assert with_table(readme, RULES) == readme
    assert with_table("no markers", RULES) == "no markers"


def test_the_generated_files_are_up_to_date() -> None:
    assert render.stale() == [], "run `make render`"


def test_check_names_stale_and_left_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "promtool_tests", lambda rules: "")  # they take seconds, and are a file like others
    files = render.generated(tmp_path)
    monkeypatch.setattr(render, "generated", lambda root: files)
    assert len(render.write(tmp_path)) == len(files)
    assert render.stale(tmp_path) == []
    page = tmp_path / "alerts" / "runbooks" / "data-stall.md"
    page.write_text("changed by hand", encoding="utf-8")
    (page.parent / "gone-rule.md").write_text("of a rule that is no more", encoding="utf-8")
    assert render.stale(tmp_path) == ["alerts/runbooks/data-stall.md", "alerts/runbooks/gone-rule.md"]
    render.write(tmp_path)
    assert page.read_text(encoding="utf-8") == runbook(STALL)
    assert not (page.parent / "gone-rule.md").exists()


def test_check_exits_with_1_when_a_file_is_stale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "stale", list)
    assert render.main(["--check"]) == 0
    monkeypatch.setattr(render, "stale", lambda: ["alerts/gpuwatch.rules.yaml"])
    assert render.main(["--check"]) == 1
    assert "stale: alerts/gpuwatch.rules.yaml" in capsys.readouterr().out


def test_the_pages_can_be_read_where_yaml_and_grafanalib_are_not_installed() -> None:
    code = "import sys, gpuwatch.render.runbooks as r; print(bool({'yaml', 'grafanalib', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
