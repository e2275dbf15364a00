"""Prometheus alerts from the rulebook."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpuwatch.expr import Condition
from gpuwatch.render.conditions import pinned, promql, recorded
from gpuwatch.render.document import document
from gpuwatch.render.runbooks import RUNBOOKS, gain_text
from gpuwatch.render.template import Voice, template
from gpuwatch.rulebook import RECORDS, Rule

LABEL_OF = {"info": "info", "warn": "warning", "critical": "critical"}
"""Severities of the rulebook, as Alertmanager's users expect them in the label."""


@dataclass(frozen=True)
class Alert:
    """One alerting rule of Prometheus."""

    name: str
    expr: str
    hold_minutes: int
    labels: dict[str, str]
    annotations: dict[str, str]


def alerts_of(rule: Rule) -> list[Alert]:
    """The alerts of a rule: one, or with ``critical_when`` two of the same name, the critical one first."""
    if rule.critical_when is None:
        return [_alert(rule, rule.severity, promql(rule, rule.when))]
    return [
        _alert(rule, "critical", promql(rule, rule.critical_when)),
        _alert(rule, rule.severity, _unless_critical(rule, rule.when)),
    ]


def texts(rule: Rule, voice: Voice) -> dict[str, str]:
    """What an alert of this rule says.

    Raises ValueError when the fix still has a {placeholder}: an alert has no number to put there.
    """
    unfilled = re.findall(r"\{(\w+)\}", rule.fix)
    if unfilled:
        raise ValueError(f"rule {rule.id}: the fix names {unfilled}, which an alert cannot fill; use `evidence` for it")
    owner = ", ".join(f"{label} {voice.label(label)}" for label in rule.owner_labels if label != "uuid")
    number = "" if pinned(rule) else f" Measured: {voice.number(rule.value.unit)} ({rule.value.name})."
    place = voice.place(" Seen at %s.") if rule.observed else ""
    if rule.place and not rule.observed:
        owner = f"{owner}, {rule.place} {voice.label(rule.place)}"
    instance = f" on {voice.label('instance')}" if "instance" in rule.matched_by else ""
    return {
        "summary": f"{voice.literal(rule.title)} ({owner}{instance})",
        "description": voice.literal(rule.because) + number + place,
        "fix": voice.literal(rule.fix),
        "gain": voice.literal(gain_text(rule)),
        "check": voice.literal(rule.check),
        "runbook_url": f"{RUNBOOKS}{rule.id}.md",
    }


def alert_rules(rules: Iterable[Rule]) -> str:
    """The rule file for Prometheus."""
    rules = tuple(rules)
    records = {each.name: each.expr.promql() for each in recorded(rules)}
    if any(rule.when.metrics() & RECORDS.keys() for rule in rules):
        records |= RECORDS
    body: list[dict[str, object]] = [{"record": name, "expr": expr} for name, expr in records.items()]
    body += [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": f"{alert.hold_minutes}m",
            "labels": alert.labels,
            "annotations": alert.annotations,
        }
        for rule in rules
        for alert in alerts_of(rule)
    ]
    return document({"groups": [{"name": "gpuwatch", "rules": body}]}, _inhibitions(rules))


def _alert(rule: Rule, severity: str, expr: str) -> Alert:
    labels = {"severity": LABEL_OF[severity], "rule": rule.id}
    return Alert(rule.alert, expr, rule.hold_minutes, labels, texts(rule, template()))


def _unless_critical(rule: Rule, condition: Condition) -> str:
    # By ALERTS rather than by the condition: the warning stays until the critical alert has served its own hold.
    on = ", ".join(rule.matched_by)
    firing = f'ALERTS{{alertname="{rule.alert}", alertstate="firing", severity="critical"}}'
    return f"({promql(rule, condition)})\nunless on ({on})\n{firing}"


def _inhibitions(rules: Iterable[Rule]) -> str:
    """What Alertmanager is expected to mute, as a comment."""
    lines = [
        "",
        "A warning is left out by its own expression while the critical alert of the same name fires.",
        "Alertmanager mutes what follows from another alert (deploy/stack/alertmanager/alertmanager.yml):",
    ]
    lines += [f'  rule="{rule.id}" mutes rule=~"{"|".join(rule.suppresses)}"' for rule in rules if rule.suppresses]
    return "\n".join(lines)
