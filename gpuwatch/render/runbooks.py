"""A page for every rule: what it means, when it fires, what to do. ``gpuwatch explain`` shows the same text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuwatch.render.conditions import promql, recorded
from gpuwatch.rulebook import RULES_BY_ID, Rule
from gpuwatch.rulebook.techniques import TECHNIQUES

RUNBOOKS = "alerts/runbooks/"
"""Where the runbooks are, as alerts and panels link to them. A site that serves them writes its address here."""


def runbook(rule: Rule) -> str:
    """The rule's page, as Markdown."""
    sections = (
        ("Fires when", _fires_when(rule)),
        ("What you are told", _evidence(rule)),
        ("What to do", rule.fix),
        ("With the run's own numbers", _clauses(rule)),
        ("What it can bring", _sentence(gain_text(rule))),
        ("How to check", rule.check),
        ("Look-alikes that stay quiet", _list(f"{_capital(name)}." for name in _quiet(rule))),
        ("What it explains", _consequences(rule)),
        ("Technique", _list(f"{_capital(TECHNIQUES[id])} ({id})." for id in rule.techniques)),
        ("Note", rule.notes),
    )
    pages = [f"# {rule.title}", f"`{rule.id}`, {_severity(rule)}, alert `{rule.alert}`.", rule.because]
    pages += [f"## {heading}\n\n{text}" for heading, text in sections if text]
    return "\n\n".join(pages) + "\n"


def gain_text(rule: Rule) -> str:
    """The gain in words; with its bound where it is a share of step time."""
    if rule.gain.removable is None:
        return rule.gain.text
    return f"{rule.gain.text}; without a share s of its time a step is at most 1 / (1 - s) times as fast"


def _severity(rule: Rule) -> str:
    name = {"info": "info", "warn": "warning", "critical": "critical"}[rule.severity]
    return name if rule.critical_when is None else f"{name} or critical"


def _fires_when(rule: Rule) -> str:
    minutes = f"{rule.hold_minutes} minute{'s' if rule.hold_minutes > 1 else ''}"
    opening = f"This holds for {minutes}:" if rule.hold_minutes else "As soon as this holds:"
    text = f"{opening}\n\n```promql\n{promql(rule, rule.when)}\n```"
    if rule.critical_when is not None:
        text += f"\n\nIt is critical when this holds as long:\n\n```promql\n{promql(rule, rule.critical_when)}\n```"
    for each in recorded([rule]):
        text += f"\n\n`{each.name}` is recorded from\n\n```promql\n{each.expr.promql()}\n```"
    return text


def _evidence(rule: Rule) -> str:
    text = _capital(re.sub(r"\{(\w+)\}", r"*\1*", rule.evidence))
    return f"{text}.{' The finding names the place.' if rule.observed else ''}"


def _clauses(rule: Rule) -> str:
    # In capitals, as some stand within code, where Markdown knows no emphasis.
    return _list(re.sub(r"\{(\w+)\}", lambda named: named[1].upper(), clause.text) for clause in rule.clauses)


def _quiet(rule: Rule) -> list[str]:
    return [example.name for example in rule.examples if not example.fires]


def _consequences(rule: Rule) -> str:
    if not rule.suppresses:
        return ""
    known = [
        f"[{RULES_BY_ID[id].title}]({id}.md) (`{id}`)" if id in RULES_BY_ID else f"`{id}`" for id in rule.suppresses
    ]
    return "While it holds, these are its consequences and are not reported apart:\n\n" + _list(known)


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sentence(text: str) -> str:
    return _capital(text).rstrip(".") + "."
