"""What the alerts are tried on: the rulebook's examples, and cases made from them.

A made case takes its expectation from the Python reading of the condition, so each of them is one more place where
the two readings must agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuwatch.advisor import severity_at
from gpuwatch.catalog import METRICS, OBSERVATION, SCOPES
from gpuwatch.expr import Compare, Expr, History, Rate, series_key
from gpuwatch.render.conditions import comparisons, within
from gpuwatch.render.edges import Edge, Series, edge, history, joins, parts_of
from gpuwatch.rulebook import Example, Rule

_LABELS = {scope: {"run"} if scope == "run" else {"instance", "job", *labels} for scope, labels in SCOPES.items()}
"""The labels of an alert's owner: one on the run as a whole is of no node."""

Owner = tuple[tuple[str, str], ...]
"""The labels that say whose readings they are, the scrape's ``instance`` among them."""


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
    yield from _edges(rule)
    yield from (case for example in _leading(rule, firing).values() for case in _missing(rule, example))
    yield from (case for example in firing for case in _halves(rule, example))
    yield from _beside(rule, firing, quiet)
    yield from (_foreign(rule, example) for example in quiet if _own(rule, example.series))
    yield _resolves(rule, firing[0], quiet[0])
    yield from _resets(rule, quiet)


def owner(rule: Rule, **other: str) -> Owner:
    """An owner's labels; ``other`` names those that differ from the usual ones."""
    usual = {"run": "r1", "rank": "0", "gpu": "0", "uuid": "GPU-0"}
    named = [name for name in rule.owner_labels if not (rule.across and name == "rank")]
    labels = {"instance": "node-a:9847", "job": "gpuwatch", **{name: usual[name] for name in named}}
    return tuple(sorted({**labels, **other}.items()))


def series_name(whose: Owner, key: str) -> str:
    """A series of an example with its owner's labels. Two ranks of a run are on a node."""
    name, labels = key.partition("{")[0], labels_of(key)
    if METRICS[name].scope == "run":  # computed by Prometheus: of no node and no scrape
        return series_key(name, {"run": dict(whose)["run"], **labels})
    return series_key(name, {**dict(_of_rank(whose, labels.get("rank", ""))), **labels})


def fired(rule: Rule, whose: Owner, series: Series, minute: int) -> tuple[Fired, ...]:
    """The alerts that fire at this minute by the Python reading: the condition held for as long as the rule asks."""
    found = []
    for seen, part in _places(rule, series).items():
        by_minute = [_views(rule, part, then) for then in range(minute - rule.hold_minutes, minute + 1)]
        for rank, place in by_minute[-1]:
            held = [severity_at(rule, views.get((rank, place), {})) for views in by_minute]
            if None in held:
                continue
            severity = "critical" if set(held) == {"critical"} else rule.severity
            value = rule.value.expr.value(by_minute[-1][rank, place])
            mine = tuple((label, text) for label, text in _of_rank(whose, rank) if label in _LABELS[rule.scope])
            found.append(Fired(mine, seen or place, severity, math.nan if value is None else value))
    return tuple(found)


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
    expected = {minute: fired(rule, whose, example.series, minute) for minute in (first, last)}
    return Case(example.name, {whose: example.series}, {first - 1: (), **expected} if first else expected)


def _edges(rule: Rule) -> Iterator[Case]:
    """Readings just on either side of each limit, from the first examples in which it decides."""
    whose, seen = owner(rule), set()
    for part, example in itertools.product(parts_of(rule), rule.examples):
        found = edge(rule, part, example.series)
        if found is None:
            continue
        last = _last(example.series)
        outcomes = [fired(rule, whose, series, last) for series in (found.holds, found.fails)]
        severities = tuple(tuple(each.severity for each in outcome) for outcome in outcomes)
        if severities[0] == severities[1] or (part, severities) in seen:
            continue
        seen.add((part, severities))
        for word, series, outcome in zip(("just", "not quite"), (found.holds, found.fails), outcomes, strict=True):
            yield Case(f"{example.name}, {word} {_called(part)}", {whose: series}, {last: outcome})


def _missing(rule: Rule, example: Example) -> Iterator[Case]:
    """Each series left out in turn: a missing signal is unknown, not zero."""
    whose, last = owner(rule), _last(example.series)
    for key in example.series:
        rest = {other: values for other, values in example.series.items() if other != key}
        if rest and key.partition("{")[0] in rule.when.metrics():
            name = f"{example.name}, without {key}"
            yield Case(name, {whose: rest}, {last: fired(rule, whose, rest, last)})


def _halves(rule: Rule, example: Example) -> Iterator[Case]:
    """Two neighbours, each with one half of the condition: readings of two owners must not mix."""
    deciding = {part: found for part in parts_of(rule) if (found := edge(rule, part, example.series))}
    conditions = [rule.when] if rule.critical_when is None else [rule.when, rule.critical_when]
    for join in dict.fromkeys(join for condition in conditions for join in joins(condition)):
        left, right = (
            _decides(rule, example, side, deciding) for side in (comparisons(join.left), comparisons(join.right))
        )
        if left is not None and right is not None and left != right:
            name = f"{example.name}, but {_called(left.part)} and {_called(right.part)} are true of two neighbours"
            yield _neighbours(rule, name, right.fails, left.fails)


def _decides(rule: Rule, example: Example, side: Sequence[Compare], edges: Mapping[Compare, Edge]) -> Edge | None:
    """The first of these comparisons without which the alert changes."""
    whose, last = owner(rule), _last(example.series)
    usual = [each.severity for each in fired(rule, whose, example.series, last)]
    for part in side:
        if part in edges and [each.severity for each in fired(rule, whose, edges[part].fails, last)] != usual:
            return edges[part]
    return None


def _beside(rule: Rule, firing: Sequence[Example], quiet: Sequence[Example]) -> Iterator[Case]:
    """What holds of a neighbour neither silences an alert nor changes its severity."""
    leading = _leading(rule, firing)
    for severity, example in leading.items():
        # a run beside another that has the same fault: their ranks must not mix
        same = [other for other in firing[-1:] if rule.across and other is not example]
        others = [*quiet, *(other for name, other in leading.items() if name != severity), *same]
        for other in others:
            yield _neighbours(rule, f"{example.name}, beside {other.name}", example.series, other.series)


def _leading(rule: Rule, firing: Sequence[Example]) -> dict[str, Example]:
    """The first firing example of each severity."""
    return {example.severity or rule.severity: example for example in reversed(firing)}


def _neighbours(rule: Rule, name: str, one: Series, other: Series) -> Case:
    """Pairs of owners that differ in one label alone; each pair is on a node of its own."""
    readings: dict[Owner, Series] = {}
    for index, label in enumerate(("run",) if rule.across else ("instance", *rule.owner_labels)):
        node = {"instance": f"node-{index}:9847"}
        readings[owner(rule, **node)] = one
        readings[owner(rule, **{**node, label: f"other-{label}"})] = other
    last = max(_last(one), _last(other))
    return Case(
        name, readings, {last: tuple(each for whose in readings for each in fired(rule, whose, readings[whose], last))}
    )


def _foreign(rule: Rule, example: Example) -> Case:
    """A large observation for another rule is none of this one's business."""
    whose, last = owner(rule), _last(example.series)
    foreign = {
        key.replace(f'rule="{rule.id}"', 'rule="another-rule"'): [1000.0 + 100 * value for value in example.series[key]]
        for key in _own(rule, example.series)
    }
    return Case(
        f"{example.name}, beside another rule's observation", {whose: {**example.series, **foreign}}, {last: ()}
    )


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


def _views(rule: Rule, series: Series, minute: int) -> dict[tuple[str, str], History]:
    return rule.views(history(series, minute)) if minute >= 0 else {}


def _of_rank(whose: Owner, rank: str) -> Owner:
    """The owner's labels for a rank of the run; whose readings of single ranks or GPUs are is said already."""
    return (
        tuple(sorted({**dict(whose), "rank": rank, "instance": f"node-{int(rank) // 2}:9847"}.items()))
        if rank
        else whose
    )


def _places(rule: Rule, series: Series) -> dict[str, Series]:
    """The series by place: an alert of an observed rule fires for each place apart."""
    if not rule.observed:
        return {"": series}
    mine = _own(rule, series)
    return {
        labels_of(key)["where"]: {
            other: values for other, values in series.items() if other == key or other not in mine
        }
        for key in mine
    }


def _own(rule: Rule, series: Series) -> list[str]:
    return [key for key in series if key.startswith(OBSERVATION.name) and f'rule="{rule.id}"' in key]


def labels_of(key: str) -> dict[str, str]:
    """The labels of a series key of an example; their values must not hold quotes or commas."""
    inner = key.partition("{")[2].rstrip("}")
    return {name: text.strip('"') for name, _, text in (part.partition("=") for part in inner.split(",") if part)}


def _parts(rule: Rule) -> Iterator[Expr]:
    for part in comparisons(rule.when):
        yield from (*within(part.left), *within(part.right))


def _is_counter(key: str) -> bool:
    return METRICS[key.partition("{")[0]].kind == "counter"


def _called(part: Compare) -> str:
    """A comparison in short: its metrics without the prefix they share."""
    names = " per ".join(sorted(name.removeprefix("gpuwatch_") for name in part.left.metrics()))
    right = "its limit" if part.right.metrics() else part.right.promql()
    return f"{names} {part.symbol} {right}"


def _last(series: Series) -> int:
    return max(len(values) for values in series.values()) - 1
