"""Every rule: complete, proved both ways by its examples, and frozen where users build on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuwatch.advisor import firing, severity_of
from gpuwatch.catalog import METRICS
from gpuwatch.render.cases import labels_of
from gpuwatch.rulebook import RULES, RULES_BY_ID, Example, Rule
from gpuwatch.rulebook.rule import SEVERITIES, flat, ramp
from gpuwatch.rulebook.techniques import TECHNIQUES

ROOT = Path(__file__).resolve().parent.parent
FROZEN = Path(__file__).resolve().parent / "frozen.txt"
BEYOND = ROOT.parent / "shared" / "TECHNIQUES.md"

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
every_example = pytest.mark.parametrize(
    ("rule", "example"),
    [(rule, example) for rule in RULES for example in rule.examples],
    ids=[f"{rule.id}: {example.name}" for rule in RULES for example in rule.examples],
)


@every_example
def test_an_example_fires_or_stays_quiet_as_it_says(rule: Rule, example: Example) -> None:
    expected = (example.severity or rule.severity) if example.fires else None
    assert severity_of(rule, example.history()) == expected


@every_example
def test_an_example_is_made_of_series_that_are_published(rule: Rule, example: Example) -> None:
    for key in example.series:
        metric = METRICS[key.partition("{")[0]]
        assert metric.scope == rule.scope or (rule.across and metric.scope == "rank")
        ranked = rule.across and metric.scope == "rank"
        assert set(labels_of(key)) == {*metric.labels, *(("rank",) if ranked else ())}
        assert metric.kind != "counter" or all(value >= 0 for value in example.series[key])
    assert len({len(values) for values in example.series.values()}) == 1
    assert example.severity is None or example.fires


@every_rule
def test_a_rule_is_proved_both_ways(rule: Rule) -> None:
    assert {example.fires for example in rule.examples} == {True, False}
    names = [example.name for example in rule.examples]
    assert len(set(names)) == len(names)
    if rule.critical_when is not None:
        severities = {example.severity or rule.severity for example in rule.examples if example.fires}
        assert severities == {rule.severity, "critical"}


@every_rule
def test_a_rule_is_complete(rule: Rule) -> None:
    assert rule.severity in SEVERITIES and rule.scope in ("rank", "gpu", "peer", "run")
    assert all((rule.title, rule.because, rule.evidence, rule.fix, rule.gain.text, rule.check))
    assert not rule.title.endswith(".") and rule.because.endswith(".") and rule.check.endswith(".")
    assert 0 <= rule.hold_minutes <= 30
    scopes = {METRICS[name].scope for name in rule.when.metrics()}
    assert scopes <= {"rank", "run"} if rule.across else scopes == {rule.scope}
    assert (rule.when.metrics() | rule.value.expr.metrics()) <= METRICS.keys()
    assert ("gpuwatch_observation" in rule.when.metrics()) is rule.observed


@every_rule
def test_texts_name_only_quantities_that_there_are(rule: Rule) -> None:
    known = {rule.value.name, *(quantity.name for quantity in rule.quantities)}
    assert set(re.findall(r"\{(\w+)\}", rule.evidence)) <= known
    assert not re.findall(r"\{(\w+)\}", rule.fix + rule.gain.text + rule.check)
    assert all(set(re.findall(r"\{(\w+)\}", clause.text)) <= known for clause in rule.clauses)


@every_rule
def test_a_rule_names_techniques_and_consequences_that_there_are(rule: Rule) -> None:
    assert set(rule.techniques) <= TECHNIQUES.keys()
    assert set(rule.suppresses) <= RULES_BY_ID.keys() - {rule.id}


def test_ids_are_unique_and_make_names_of_alerts() -> None:
    assert len(RULES_BY_ID) == len(RULES) == len({rule.alert for rule in RULES})
    assert all(re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", rule.id) for rule in RULES)
    assert RULES_BY_ID["data-stall"].alert == "GpuwatchDataStall"


def test_no_rule_explains_away_what_explains_it() -> None:
    for rule in RULES:
        for consequence in rule.suppresses:
            assert rule.id not in RULES_BY_ID[consequence].suppresses


def test_one_cause_is_one_finding() -> None:
    example = next(example for example in RULES_BY_ID["data-workers-zero"].examples if example.fires)
    history = example.history()
    assert severity_of(RULES_BY_ID["data-stall"], history) is not None
    assert [rule.id for rule, _ in firing(history)] == ["data-workers-zero"]


def test_nothing_known_is_nothing_said() -> None:
    assert firing({}) == []


def test_shapes_of_examples() -> None:
    assert flat(2, 3) == (2, 2, 2, 2)
    assert ramp(2, 3) == (0, 2, 4, 6)


def test_what_users_build_on_is_frozen() -> None:
    """Ids, alerts, severities and metrics are in dashboards and routes of users: a change needs a CHANGELOG line."""
    assert FROZEN.read_text(encoding="utf-8") == frozen(), (
        "ids, severities or metrics changed: say so in CHANGELOG.md, then run "
        "`.venv/bin/python -c 'import tests.test_rulebook as t; t.FROZEN.write_text(t.frozen())'` in the repository"
    )


def frozen() -> str:
    """What users build on, one line each."""
    rules = [
        f"rule {rule.id} {rule.alert} {rule.severity}{'' if rule.critical_when is None else ',critical'}"
        for rule in RULES
    ]
    metrics = [
        f"metric {name} {metric.kind} {metric.scope} {','.join(metric.labels) or '-'}"
        for name, metric in METRICS.items()
    ]
    return "\n".join([*sorted(rules), *sorted(metrics)]) + "\n"


@pytest.mark.skipif(not BEYOND.is_file(), reason="the list of techniques is not beside the checkout")
def test_each_technique_is_named_by_one_of_the_rules_meant_for_it() -> None:
    rows = re.findall(r"^\| (T\d\d) \|[^|]*\|[^|]*\|([^|]*)\|$", BEYOND.read_text(encoding="utf-8"), re.MULTILINE)
    assert [id for id, _ in rows] == sorted(TECHNIQUES)
    for id, named in rows:
        ours = [
            RULES_BY_ID[rule] for rule in re.findall(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+", named) if rule in RULES_BY_ID
        ]
        assert not ours or any(id in rule.techniques for rule in ours), f"{id}: none of {[rule.id for rule in ours]}"
