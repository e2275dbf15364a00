"""Which rules hold on a history, said in words with this run's own numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from gpuwatch.expr import History, Peered
from gpuwatch.hindered import follows, without_waits
from gpuwatch.history import history_of, observation_key, settled, slow_phase
from gpuwatch.reader import Observation, Snapshot
from gpuwatch.rulebook import RULES, Rule
from gpuwatch.rulebook.rule import SEVERITIES
from gpuwatch.shortage import held

UNKNOWN = {"ratio": "an unknown share", "seconds": "an unknown time", "bytes": "an unknown amount"}

MOST_PLACES = 5
"""Findings of one rule at most, each with a place of its own."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run, and what to do about it.

    ``gain`` says in words what following ``fix`` can bring at most; ``gain_bound`` is that as a factor of speed where
    it is one. ``where`` is a place in the user's program, or empty.
    """

    rule: str
    severity: str
    summary: str
    evidence: str
    where: str
    fix: str
    gain: str
    check: str
    gain_bound: float | None = None

    def as_dict(self) -> dict[str, object]:
        """The finding as the reports' JSON has it."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "summary": self.summary,
            "evidence": self.evidence,
            "where": self.where,
            "fix": self.fix,
            "gain": self.gain,
            "gain_bound": self.gain_bound,
            "check": self.check,
        }


def advise(snapshot: Snapshot, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """The findings of one rank by itself, most valuable first."""
    return [finding for finding, _ in advise_run([snapshot], rules)]


def advise_run(snapshots: Sequence[Snapshot], rules: Iterable[Rule] = RULES) -> list[tuple[Finding, Snapshot | None]]:
    """The findings of the ranks of a run, most valuable first, each with the rank it is about.

    Rules on several ranks compare those given here; one on the run as a whole is about no rank.
    """
    rules = tuple(rules)
    histories = [history_of(snapshot) for snapshot in snapshots]
    seen = list(_compared(snapshots, histories, [rule for rule in rules if rule.across]))
    common = {consequence for rule, _, _ in seen for consequence in rule.suppresses}
    found: list[tuple[Finding, Snapshot | None]] = []
    explained: dict[int, set[str]] = {}
    for snapshot, history in zip(snapshots, histories, strict=True):
        slow = slow_phase(settled(snapshot.ring))
        fired = firing(history, [rule for rule in rules if rule.scope == "rank"], slow)
        ids = {rule.id for rule, _ in fired}
        explained[id(snapshot)] = {consequence for rule, _ in fired for consequence in rule.suppresses}
        found += [
            (_named(_finding(rule, severity, view, place), snapshot, ids), snapshot)
            for rule, severity in fired
            if rule.id not in common
            for view, place in _places(rule, history, snapshot.observations)
        ]
    everywhere = {consequence for rules_of_rank in explained.values() for consequence in rules_of_rank}
    for rule, whose, finding in seen:
        if rule.id not in common | (everywhere if whose is None else explained[id(whose)]):
            found.append((finding, whose))
    return sorted(without_waits(found), key=lambda pair: worth(pair[0]), reverse=True)


def _compared(
    snapshots: Sequence[Snapshot], histories: Sequence[History], rules: Iterable[Rule]
) -> Iterator[tuple[Rule, Snapshot | None, Finding]]:
    """The rules on several ranks that hold, with the rank and what there is to say of it."""
    shared: dict[object, Any] = {}
    for rule in rules:
        ranks: list[tuple[Snapshot | None, History]] = [(None, {})]
        if rule.scope == "peer":
            ranks = list(zip(snapshots, histories, strict=True))
        for snapshot, own in ranks:
            for (_, place), view in rule.views(Peered(own, histories, shared)).items():
                severity = severity_at(rule, view)
                if severity is not None:
                    seen = _beside_peers(rule, snapshot if len(snapshots) > 1 else None, place)
                    told = [] if snapshot is None else [each for each in snapshot.observations if each.rule == rule.id]
                    evidence = "; ".join(dict.fromkeys(each.evidence for each in told))
                    yield rule, snapshot, _finding(rule, severity, view, Observation(rule.id, seen, evidence, 0.0, 0))


def _beside_peers(rule: Rule, snapshot: Snapshot | None, place: str) -> str:
    """Which rank it is, on which node, and where in its step."""
    parts = [f"{rule.place}: {place}"] if place else []
    if snapshot is not None:
        node = snapshot.identity.get("node")
        parts.insert(0, f"rank {snapshot.rank} on {node}" if node else f"rank {snapshot.rank}")
    return ", ".join(parts)


def advise_gpu(history: History, where: str, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """The findings of one GPU, from its recent samples."""
    fired = firing(history, [rule for rule in rules if rule.scope == "gpu"])
    return [_finding(rule, severity, history, Observation(rule.id, where, "", 0.0, 0)) for rule, severity in fired]


def firing(history: History, rules: Iterable[Rule] = RULES, slow: str | None = None) -> list[tuple[Rule, str]]:
    """The rules that hold, with their severity; mere consequences of another that holds are left out.

    ``slow`` is the phase that grows in slow steps, where that is known.
    """
    holding = {rule.id: (rule, severity) for rule in rules if (severity := severity_of(rule, history))}
    explained = {of for rule, _ in holding.values() for of in rule.suppresses if follows(of, rule.id, slow)}
    return [pair for id, pair in holding.items() if id not in explained]


def severity_of(rule: Rule, history: History) -> str | None:
    """How serious the rule is on this history, at any of its ranks and places; None where it does not hold."""
    found = {severity_at(rule, view) for view in rule.views(history).values()}
    return max((severity for severity in found if severity), key=SEVERITIES.index, default=None)


def severity_at(rule: Rule, history: History) -> str | None:
    """How serious the rule is on one view of a history; None where it does not hold or a signal is missing."""
    if rule.when.holds(history) is not True:
        return None
    if rule.critical_when is not None and rule.critical_when.holds(history) is True:
        return "critical"
    return rule.severity


def _finding(rule: Rule, severity: str, history: History, place: Observation | None) -> Finding:
    quantities = {quantity.name: quantity for quantity in (rule.value, *rule.quantities)}
    known = {name: quantity.expr.value(history) for name, quantity in quantities.items()}
    numbers = {name: spoken(number, quantities[name].unit) for name, number in known.items()}
    unknown = {name for name, number in known.items() if number is None}
    first, *further = rule.evidence.split("; ")
    evidence = "; ".join(fill(part, numbers) for part in (first, *(part for part in further if _told(part, unknown))))
    clauses = [
        fill(clause.text, numbers)
        for clause in rule.clauses
        if _told(clause.text, unknown) and (clause.when is None or clause.when.holds(history) is True)
    ]
    if place is not None and place.evidence:
        evidence = f"{evidence}; {place.evidence}"
    chosen = next((text for case, text in rule.advice if case.holds(history) is True), rule.fix)
    bound = rule.gain.bound(history)
    return Finding(
        rule=rule.id,
        severity=severity,
        summary=rule.title,
        evidence=evidence,
        where="" if place is None else place.where,
        fix=" ".join((chosen, *clauses)),
        gain=rule.gain.text if bound is None else f"at most {bound:.2f}x as fast: {rule.gain.text}",
        check=rule.check,
        gain_bound=bound,
    )


def _named(finding: Finding, snapshot: Snapshot, fired: Set[str]) -> Finding:
    """What no metric could carry: the phase that grows in slow steps, who held the memory when it ran out."""
    if finding.rule == "mem-oom":
        who = held(snapshot, fired)
        return replace(finding, evidence=f"{finding.evidence}; {who}") if who else finding
    if finding.rule != "comp-step-jitter":
        return finding
    phase = slow_phase(settled(snapshot.ring))
    if phase is None:
        return finding
    return Finding(**{**vars(finding), "where": f"phase: {phase}", "evidence": f"{finding.evidence}; it is {phase}"})


def _places(
    rule: Rule, history: History, observations: Iterable[Observation]
) -> Iterator[tuple[History, Observation | None]]:
    """The places where a rule holds, each with the history as it is without the others; None for a rule without any."""
    seen = sorted((place for place in observations if place.rule == rule.id), key=lambda place: -place.magnitude)
    if not rule.observed or len(seen) < 2:
        yield history, seen[0] if seen else None
        return
    keys = {observation_key(place.rule, place.where): place for place in seen}
    elsewhere = {key: samples for key, samples in history.items() if key not in keys}
    holding = [
        (alone, place)
        for key, place in list(keys.items())
        if rule.when.holds(alone := {**elsewhere, key: history[key]}) is True
    ]
    # A place without a name says no more than one with a name does.
    named = [(alone, place) for alone, place in holding if place.where]
    yield from (named or holding)[:MOST_PLACES]


def worth(finding: Finding) -> tuple[int, float]:
    """How much a finding weighs: its severity, then the largest speed-up it can bring."""
    return SEVERITIES.index(finding.severity), finding.gain_bound or 0.0


def _told(text: str, unknown: Set[str]) -> bool:
    """Whether every quantity that the text names is known."""
    return unknown.isdisjoint(re.findall(r"\{(\w+)\}", text))


def fill(text: str, numbers: Mapping[str, str]) -> str:
    """Put numbers in the braces of a rule's text; other braces (code, globs) stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda found: numbers.get(found[1], found[0]), text)


def spoken(number: float | None, unit: str) -> str:
    """A number as a person reads it: ``0.124`` in ``seconds`` is ``124 ms``, in ``ratio`` ``12 %``."""
    if number is None:
        return UNKNOWN.get(unit, "an unknown number of")
    if unit == "ratio":
        return f"{100 * number:.0f} %" if number >= 0.1 else f"{100 * number:.1f} %"
    if unit == "count":
        return f"{number:,.0f}" if number == round(number) or number >= 100 else f"{number:.1f}"
    if unit == "celsius":
        return f"{number:.0f} °C"
    if unit == "timestamp":
        return f"{datetime.fromtimestamp(number, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    if unit == "seconds":
        return _scaled(number, ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us")))
    if unit == "bytes":
        return _scaled(number, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))
    if unit == "hertz":
        return _scaled(number, ((1e9, "GHz"), (1e6, "MHz"), (1, "Hz")))
    return f"{number:g}"


def _scaled(number: float, scales: tuple[tuple[float, str], ...]) -> str:
    for scale, unit in scales:
        if abs(number) >= scale:
            return f"{number / scale:.3g} {unit}" if number / scale < 1000 else f"{number / scale:,.0f} {unit}"
    scale, unit = scales[-1]
    return f"{number / scale:.3g} {unit}"
