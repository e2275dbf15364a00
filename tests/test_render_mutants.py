"""A mistake planted in a generated alert must make its promtool cases fail.

All mutants of one alert go through promtool together: each under a name of its own, with its own copy of the tests.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwatch.render.alerts import alert_rules
from gpuwatch.render.promtool import promtool_tests
from gpuwatch.rulebook import RECORDS, RULES, RULES_BY_ID, Rule
from tests.promtool import promtool

pytestmark = [
    pytest.mark.debian,
    pytest.mark.mutants,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed"),
]

ROOT = Path(__file__).resolve().parent.parent
Alerts = list[dict[str, Any]]

FLIPPED = {">=": "<", "<=": ">", ">": "<=", "<": ">=", "==": "!=", "!=": "=="}
SWAPPED = {"and": "unless", "unless": "and", "or": "and"}

ACROSS = {"max": "min", "min": "max", "avg": "max", "sum": "avg", "count": "max"}

SHARES = ((0, 32), (16, 32), (8, 16), (4, 8), (2, 4), (1, 4), (3, 4))
"""Parts into which a rule's cases are divided: each is every so many of them from a first one on."""

EQUIVALENT = {
    # a whole number of ranks
    ("dist-comm-exposed", "limit 2 smaller, place 3 (critical)"),
    ("dist-comm-exposed", "limit 2 smaller, place 3 (warning)"),
    # another join on the rank reads the same series
    ("dist-straggler", "on without rank, place 2 (critical)"),
    # a daemon that is scraped twice says the same twice
    ("dist-straggler", "across max another (critical)"),
    ("dist-straggler", "across max another (warning)"),
    # the largest of the quantiles is the 99th percentile anyway
    ("run-hang", 'matcher {quantile="0.99"} dropped'),
    # a quarter is more than a tenth anyway
    ("data-stall", "limit 0.1 larger (critical)"),
    ("data-stall", "limit 0.1 smaller (critical)"),
    # at a sample a minute one throttled sample of five minutes is already more than a tenth
    ("hw-thermal-throttle", "mean avg_over_time max_over_time"),
}
"""Mutants that mean the same as the alert they were made from."""

SAME_RECORDS = {
    # info is always 1
    "experiment:gpuwatch_step_seconds:now: across max another, place 1",
    # a rank of a run is on one node
    "experiment:gpuwatch_step_seconds:now: on without instance, place 1",
    # a run has one number of its own
    "gpuwatch_earlier_step_seconds: across max another",
}
"""Mutants of what is recorded that mean the same."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_promtool_cases_notice_every_mutant(rule: Rule, tmp_path: Path) -> None:
    written: Alerts = _loaded(alert_rules([rule]))["groups"][0]["rules"]
    # The cases give what those series come to: their own mutants are below.
    alerts = [each for each in written if each.get("record") not in RECORDS]
    mutants = dict(_mutants(alerts))
    for known in [what for id, what in EQUIVALENT if id == rule.id]:
        del mutants[known]
    if rule.across:  # a rank of a run is on one node
        mutants = {what: mutant for what, mutant in mutants.items() if not what.startswith("on without instance")}
    survivors = _survivors(rule, mutants, tmp_path)
    assert not survivors, f"{len(survivors)} of {len(mutants)} mutants of {rule.id} pass its tests: {survivors}"


def test_the_stories_notice_every_mutant_of_what_is_recorded_of_earlier_runs(tmp_path: Path) -> None:
    rules: Alerts = _loaded(alert_rules([RULES_BY_ID["perf-regression"]]))["groups"][0]["rules"]
    (story,) = [
        test
        for test in _loaded((ROOT / "alerts" / "extra.test.yaml").read_text("utf-8"))["tests"]
        if "earlier runs" in test["name"]
    ]
    body = {"rule_files": ["mutant.rules.yaml"], "evaluation_interval": "1m", "tests": [story]}
    _write(tmp_path / "story.test.yaml", body)
    survivors = []
    for index, rule in enumerate(rules):
        if "step_seconds" not in rule.get("record", ""):
            continue  # the others are made by the same function
        for what, _, expr in _changed_expr(rule["expr"]):
            mutant = [*rules[:index], {**rule, "expr": expr}, *rules[index + 1 :]]
            _write(tmp_path / "mutant.rules.yaml", {"groups": [{"name": "mutant", "rules": mutant}]})
            if promtool(tmp_path, "test", "rules", "story.test.yaml").returncode == 0:
                survivors.append(f"{rule['record']}: {what}")
    assert set(survivors) == SAME_RECORDS


def _survivors(rule: Rule, mutants: dict[str, Alerts], directory: Path) -> list[str]:
    """What was changed in the mutants that pass every case; a few cases at a time, to the mutants still alive."""
    named = {f"{rule.alert}M{index}": what for index, what in enumerate(mutants)}
    alive = {name: _renamed(mutants[what], rule.alert, name) for name, what in named.items()}
    cases = _loaded(promtool_tests([rule]))["tests"]
    # cases of every kind in each share, so that the first ones, which are small, already notice most mutants
    shares = [share for start, every in SHARES if (share := cases[start::every])]
    halves = [dict(itertools.islice(alive.items(), half, None, 2)) for half in range(2)]
    with ThreadPoolExecutor(2) as pool:
        left = pool.map(_alive, halves, [shares] * 2, [directory / "even", directory / "odd"])
    return [named[name] for part in left for name in part]


def _alive(alive: dict[str, Alerts], shares: list[list[dict[str, Any]]], directory: Path) -> list[str]:
    """The mutants that pass every share of the cases."""
    directory.mkdir()
    for cases in shares:
        refused = {"unknown"}
        while alive and refused:
            noticed, refused = _noticed(alive, cases, directory)
            alive = {name: alerts for name, alerts in alive.items() if name not in noticed | refused}
    return list(alive)


def _noticed(alive: dict[str, Alerts], cases: list[dict[str, Any]], directory: Path) -> tuple[set[str], set[str]]:
    """The mutants that fail a case, and those that Prometheus refuses to evaluate.

    A refused one ends its case, and hides what the others do there: the cases must be run again without it.
    """
    rules = [*itertools.chain(*alive.values())]
    _write(directory / "mutants.rules.yaml", {"groups": [{"name": "mutants", "rules": rules}]})
    body = {"rule_files": ["mutants.rules.yaml"], "evaluation_interval": "1m", "tests": _copied(cases, list(alive))}
    _write(directory / "mutants.test.yaml", body)
    done = promtool(directory, "test", "rules", "mutants.test.yaml")
    said = done.stdout + done.stderr
    noticed = set(re.findall(r"alertname: (\w+)", said))
    numbers = set(re.findall(r"rule: \S+(M\d+), time: .*err", said))  # of an alert, or of what is recorded for it
    refused = {name for name in alive if re.findall(r"M\d+$", name)[0] in numbers}
    assert done.returncode == 0 or noticed | refused, said
    return noticed, refused


def _mutants(alerts: Alerts) -> Iterator[tuple[str, Alerts]]:
    """Every mutant by what was changed: the alerts of one rule, one of them changed at one place."""
    several = sum("alert" in each for each in alerts) > 1
    for index, alert in enumerate(alerts):
        which = f" ({alert['labels']['severity']})" if several and "alert" in alert else ""
        which = f" ({alert['record']})" if "record" in alert else which
        frame = _changed_frame(alert) if "alert" in alert else ()
        for what, key, value in [*_changed_expr(alert["expr"]), *frame]:
            mutant = copy.deepcopy(alerts)
            if key == "severity":
                mutant[index]["labels"]["severity"] = value
            else:
                mutant[index][key] = value
            yield what + which, mutant


def _changed_expr(expr: str) -> Iterator[tuple[str, str, str]]:
    places: list[tuple[str, str, str]] = [
        (rf"(?<= )({'|'.join(FLIPPED)})(?= )", "operator", "flip"),
        (r"(?<=[<>=] )[\d.]+(?:e-?\d+)?", "limit", "larger"),
        (r"(?<=[<>=] )[\d.]+(?:e-?\d+)?", "limit", "smaller"),
        (r"(?<=\* )[\d.]+", "factor", "larger"),
        (r"(?m)^(?:and|unless|or)\b", "word", "swap"),
        (r"\{[^}]*\}", "matcher", "drop"),
        (r"\bsum without(?= \(\w+\) \(rate\(\w+\[)", "sum", "max without"),
        (r"\bavg_over_time\b", "mean", "max_over_time"),
        (r" / ", "quotient", " * "),
        (r"\b(?:max|min|avg|sum|count)(?= by \()", "across", "another"),
        (r"(?<=\) \()0\.5(?=, )", "median", "0"),
        (r"(?<=\) \()0\.5(?=, )", "median", "1"),
    ]
    for pattern, what, change in places:
        for number, found in enumerate(re.finditer(pattern, expr)):
            if expr[: found.start()].endswith("!= ") and what == "limit":
                continue  # the guard of a division
            name = f"{what} {found[0].strip()} {change}" + (f", place {number}" if number else "")
            if change == "drop":
                name = f"{what} {found[0]} dropped" + (f", place {number}" if number else "")
            yield name, "expr", expr[: found.start()] + _change(found[0], change) + expr[found.end() :]
    for number, found in enumerate(re.finditer(r"\b(on|by) \(([^)]*)\)", expr)):
        word, labels = found[1], found[2].split(", ")
        for label in labels:
            rest = ", ".join(other for other in labels if other != label)
            name = f"{word} without {label}, place {number}"
            yield name, "expr", f"{expr[: found.start()]}{word} ({rest}){expr[found.end() :]}"


def _changed_frame(alert: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    minutes = int(alert["for"].removesuffix("m"))
    yield "hold longer", "for", f"{minutes + 3}m"
    if minutes:
        yield "no hold", "for", "0m"
    yield "another severity", "severity", {"warning": "critical"}.get(alert["labels"]["severity"], "warning")


def _change(text: str, change: str) -> str:
    if change == "flip":
        return FLIPPED[text]
    if change == "swap":
        return SWAPPED[text]
    if change == "another":
        return ACROSS[text]
    if change in ("larger", "smaller"):
        number = float(text)
        return repr(number * (1.25 if change == "larger" else 0.8) if number else (1.0 if change == "larger" else -1.0))
    return "" if change == "drop" else change


def _renamed(alerts: Alerts, old: str, new: str) -> Alerts:
    """The alerts, and what is recorded for them, under names of their own."""
    records = [alert["record"] for alert in alerts if "record" in alert]
    suffix = new.removeprefix(old)

    def mine(text: str) -> str:
        for record in records:
            text = text.replace(record, record + suffix)
        return text.replace(f'"{old}"', f'"{new}"')

    return [
        {**alert, "expr": mine(alert["expr"])}
        | ({"alert": new} if "alert" in alert else {"record": alert["record"] + suffix})
        for alert in alerts
    ]


def _copied(cases: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    return [
        {
            **case,
            "alert_rule_test": [{**moment, "alertname": name} for moment in case["alert_rule_test"] for name in names],
        }
        for case in cases
    ]


def _loaded(text: str) -> Any:
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _write(path: Path, body: object) -> None:
    path.write_text(json.dumps(body), encoding="utf-8")  # which is YAML too
