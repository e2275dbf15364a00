"""Tests for promtool: every case of every rule, against the generated alerts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from gpuwatch.render.alerts import LABEL_OF, texts
from gpuwatch.render.cases import Case, Fired, cases_of, series_name
from gpuwatch.render.document import OneLine, document
from gpuwatch.render.template import spoken
from gpuwatch.rulebook import Rule

RULE_FILE = "gpuwatch.rules.yaml"


def promtool_tests(rules: Iterable[Rule], rule_file: str = RULE_FILE) -> str:
    """The test file for ``promtool test rules``; ``rule_file`` is relative to it."""
    tests = [_test(rule, case) for rule in rules for case in cases_of(rule)]
    return document({"rule_files": [rule_file], "evaluation_interval": "1m", "tests": tests})


def notation(values: Sequence[float]) -> str:
    """Values of a series as promtool reads them: ``0+20x10`` where they grow evenly, else each in turn.

    NaN is written as ``stale`` where readings end, and as ``_`` where there are none yet.
    """
    if len(values) > 1 and not any(map(math.isnan, values)):
        step, number = values[1] - values[0], values[0]
        even = True
        for value in values:
            # promtool adds the step again and again: only what comes out exactly may be written short
            even = even and number == value
            number += step
        if even:
            return f"{_plain(values[0])}{'-' if step < 0 else '+'}{_plain(abs(step))}x{len(values) - 1}"
    words = []
    for index, value in enumerate(values):
        ended = index > 0 and not math.isnan(values[index - 1])
        words.append(("stale" if ended else "_") if math.isnan(value) else _plain(value))
    return " ".join(words)


def _test(rule: Rule, case: Case) -> dict[str, object]:
    return {
        "name": f"{rule.id}: {case.name}",
        "interval": "1m",
        "input_series": [
            OneLine(series=series_name(whose, key), values=notation(values))
            for whose, series in case.readings.items()
            for key, values in series.items()
        ],
        "alert_rule_test": [_moment(rule, minute, fired) for minute, fired in case.expected.items()],
    }


def _moment(rule: Rule, minute: int, fired: Iterable[Fired]) -> dict[str, object]:
    alerts = [_alert(rule, each) for each in fired]
    return {"eval_time": f"{minute}m", "alertname": rule.alert, "exp_alerts": alerts}


def _alert(rule: Rule, fired: Fired) -> Mapping[str, object]:
    labels = dict(fired.owner)
    if fired.where:
        labels[rule.place] = fired.where
    return {
        "exp_labels": OneLine({**labels, "rule": rule.id, "severity": LABEL_OF[fired.severity]}),
        "exp_annotations": texts(rule, spoken(labels, fired.value)),
    }


def _plain(number: float) -> str:
    return repr(float(number)).removesuffix(".0")
