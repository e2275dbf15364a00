"""What the alerts are tried on: the rulebook's examples, and cases made from them.

A made case takes its expectation from the Python reading of the condition, so each of them is one more place where
the two readings must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuwatch.advisor import severity_of
from gpuwatch.catalog import METRICS, OBSERVATION
from gpuwatch.expr import Compare, Expr, History, Observed, Rate
from gpuwatch.render.conditions import comparisons, shown
from gpuwatch.rulebook import Example, Rule
from gpuwatch.rulebook.rule import MINUTE

Series = Mapping[str, Sequence[float]]
"""Readings of one owner, one a minute. NaN stands for a minute without a reading."""

Owner = tuple[tuple[str, str], ...]
"""The labels that say whose readings they are, the scrape's ``instance`` among them."""

NEAR = 0.07
"""How far a made reading stays from a limit, as a share of it: nearer than any change of a limit that matters."""


@dataclass(frozen=True)
class Fired:
    """An alert that must be firing: whose it is, where it was seen, its severity and number."""

    owner: Owner
    where: str
    severity: str
    value: float


@dataclass(frozen=True)
class Case:
    """Readings of some owners, and which alerts of the rule must fire at which minutes."""

    name: str
    readings: Mapping[Owner, Series]
    expected: Mapping[int, tuple[Fired, ...]]


def cases_of(rule: Rule) -> Iterator[Case]:
    """Every case of a rule: its examples first.

    Raises ValueError when a firing example is shorter than the rule's hold.
    """
    firing = [example for example in rule.examples if example.fires]
    quiet = [example for example in rule.examples if not example.fires]
    yield from (_example(rule, example) for example in rule.examples)
    yield from _edges(rule, firing)
    yield from _missing(rule, firing[0])
    yield from _mixed(rule, firing[0])
    yield from (case for example in quiet for case in _mixed(rule, example) if any(case.expected.values()))
    yield _resolves(rule, firing[0], quiet[0])
    yield from _resets(rule, quiet)


def owner(rule: Rule, **other: str) -> Owner:
    """An owner's labels; ``other`` names those that differ from the usual ones."""
    usual = {"run": "r1", "rank": "0", "gpu": "0", "uuid": "GPU-0"}
    labels = {"instance": "node-a:9847", "job": "gpuwatch", **{name: usual[name] for name in rule.owner_labels}}
    return tuple(sorted({**labels, **other}.items()))


def fired(rule: Rule, whose: Owner, series: Series, minute: int) -> tuple[Fired, ...]:
    """The alerts that fire at this minute by the Python reading: the condition held for as long as the rule asks."""
    found = []
    for where, part in _places(rule, series).items():
        held = [_severity(rule, part, then) for then in range(minute - rule.hold_minutes, minute + 1)]
        if None in held:
            continue
        severity = "critical" if set(held) == {"critical"} else rule.severity
        value = rule.value.expr.value(history(part, minute))
        found.append(Fired(whose, where, severity, math.nan if value is None else value))
    return tuple(found)


def history(series: Series, minute: int) -> History:
    """The readings up to a minute, as samples."""
    samples = {
        key: [(MINUTE * index, value) for index, value in enumerate(values[: minute + 1]) if not math.isnan(value)]
        for key, values in series.items()
    }
    return {key: found for key, found in samples.items() if found}


def _example(rule: Rule, example: Example) -> Case:
    whose, last = owner(rule), _last(example.series)
    if not example.fires:
        return Case(example.name, {whose: example.series}, {last: ()})
    first = next((minute for minute in range(last + 1) if fired(rule, whose, example.series, minute)), None)
    if first is None:
        raise ValueError(
            f"rule {rule.id}, example {example.name!r}: fires nowhere in its {last} minutes, the rule asks for "
            f"{rule.hold_minutes}; give it longer series"
        )
    claimed = tuple(
        Fired(each.owner, each.where, example.severity or rule.severity, each.value)
        for each in fired(rule, whose, example.series, last)
    )
    expected = {first: fired(rule, whose, example.series, first), last: claimed}
    return Case(example.name, {whose: example.series}, {first - 1: (), **expected} if first else expected)


def _edges(rule: Rule, firing: Sequence[Example]) -> Iterator[Case]:
    """Readings just below and just above each limit, from the first example in which it decides."""
    whose = owner(rule)
    conditions = [rule.when] if rule.critical_when is None else [rule.when, rule.critical_when]
    for part in dict.fromkeys(part for condition in conditions for part in comparisons(condition)):
        for example in firing:
            last = _last(example.series)
            moved = [_moved(part, example.series, factor) for factor in (1 - NEAR, 1 + NEAR)]
            outcomes = [() if series is None else fired(rule, whose, series, last) for series in moved]
            if [each.severity for each in outcomes[0]] == [each.severity for each in outcomes[1]]:
                continue
            for word, series, outcome in zip(("below", "above"), moved, outcomes, strict=True):
                if series is not None:
                    name = f"{example.name}, {_called(part.left)} just {word} {part.right.promql()}"
                    yield Case(name, {whose: series}, {last: outcome})
            break


def _missing(rule: Rule, example: Example) -> Iterator[Case]:
    """Each series left out in turn: a missing signal is unknown, not zero."""
    whose, last = owner(rule), _last(example.series)
    for key in example.series:
        rest = {other: values for other, values in example.series.items() if other != key}
        if rest and key.partition("{")[0] in rule.when.metrics():
            name = f"{example.name}, without {key}"
            yield Case(name, {whose: rest}, {last: fired(rule, whose, rest, last)})


def _mixed(rule: Rule, example: Example) -> Iterator[Case]:
    """One series of the example comes from another rank, run or node: readings of two owners must not mix."""
    last = _last(example.series)
    for key in example.series:
        rest = {other: values for other, values in example.series.items() if other != key}
        if not rest or key.partition("{")[0] not in rule.when.metrics():
            continue
        readings: dict[Owner, Series] = {}
        for index, label in enumerate(("instance", *rule.owner_labels)):
            # a node of its own for each pair; the pair differs in one label alone
            node = {"instance": f"node-{index}:9847"}
            readings[owner(rule, **node)] = rest
            readings[owner(rule, **{**node, label: f"other-{label}"})] = {key: example.series[key]}
        outcome = tuple(each for whose, series in readings.items() for each in fired(rule, whose, series, last))
        yield Case(f"{example.name}, but {key} is another's", readings, {last: outcome})


def _resolves(rule: Rule, example: Example, quiet: Example) -> Case:
    """The run is started again and is well now; what it no longer reports goes stale."""
    whose, last = owner(rule), _last(example.series)
    length = _last(quiet.series) + 1
    series: dict[str, list[float]] = {}
    for key in dict.fromkeys((*example.series, *quiet.series)):
        before = example.series.get(key, (math.nan,) * (last + 1))
        after = quiet.series.get(key, (math.nan,) * length)
        series[key] = [*before, *after]
    expected = {last: fired(rule, whose, example.series, last), last + length: ()}
    return Case(f"{example.name}, then {quiet.name}", {whose: series}, expected)


def _resets(rule: Rule, quiet: Sequence[Example]) -> Iterator[Case]:
    """A counter that starts again must not look like growth."""
    whose = owner(rule)
    for example in quiet:
        last = _last(example.series)
        counters = [key for key, values in example.series.items() if _is_counter(key) and values[-1] > values[0]]
        if not counters or not any(isinstance(each, Rate) for each in _parts(rule)):
            continue
        reset = last - 2
        series = {
            key: [value - values[reset] if key in counters and minute >= reset else value
                  for minute, value in enumerate(values)]
            for key, values in example.series.items()
        }  # fmt: skip
        yield Case(f"{example.name}, counters reset", {whose: series}, {last: ()})


def _moved(part: Compare, series: Series, factor: float) -> Series | None:
    """The series with one of them scaled so that the comparison's left side is ``factor`` times its limit."""

    def ratio(key: str, scale: float) -> float | None:
        moved = history({**series, key: [value * scale for value in series[key]]}, _last(series))
        left, right = part.left.value(moved), part.right.value(moved)
        return None if left is None or not right else left / right

    for key in series:
        if key.partition("{")[0] not in part.left.metrics():
            continue
        low, high = 1e-6, 1e6
        ends = (ratio(key, low), ratio(key, high))
        if ends[0] is None or ends[1] is None or not ends[0] < factor < ends[1]:
            continue
        for _ in range(80):
            middle = math.sqrt(low * high)
            now = ratio(key, middle)
            if now is None:
                return None
            low, high = (middle, high) if now < factor else (low, middle)
        return {**series, key: [float(f"{value * high:.6g}") for value in series[key]]}
    return None


def _severity(rule: Rule, series: Series, minute: int) -> str | None:
    return severity_of(rule, history(series, minute)) if minute >= 0 else None


def _places(rule: Rule, series: Series) -> dict[str, Series]:
    """The series by place: an alert of an observed rule fires for each place apart."""
    if not any(isinstance(each, Observed) for each in shown(rule.when) | {rule.value.expr}):
        return {"": series}
    mine = [key for key in series if key.startswith(OBSERVATION.name) and f'rule="{rule.id}"' in key]
    return {
        labels_of(key)["where"]: {
            other: values for other, values in series.items() if other == key or other not in mine
        }
        for key in mine
    }


def labels_of(key: str) -> dict[str, str]:
    """The labels of a series key of an example; their values must not hold quotes or commas."""
    inner = key.partition("{")[2].rstrip("}")
    return {name: text.strip('"') for name, _, text in (part.partition("=") for part in inner.split(",") if part)}


def _parts(rule: Rule) -> Iterator[Expr]:
    waiting = [side for part in comparisons(rule.when) for side in (part.left, part.right)]
    while waiting:
        expr = waiting.pop()
        yield expr
        waiting += [side for side in (getattr(expr, "left", None), getattr(expr, "right", None)) if side is not None]


def _is_counter(key: str) -> bool:
    return METRICS[key.partition("{")[0]].kind == "counter"


def _called(expr: Expr) -> str:
    """A short name of a comparison's left side: its metrics without the prefix they share."""
    return " and ".join(sorted(name.removeprefix("gpuwatch_") for name in expr.metrics()))


def _last(series: Series) -> int:
    return max(len(values) for values in series.values()) - 1
