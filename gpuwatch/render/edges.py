"""Readings at the very edge of a limit: an example moved until one comparison just holds, or just does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuwatch.expr import Compare, Condition, Const, History, Joined
from gpuwatch.render.conditions import comparisons
from gpuwatch.rulebook import Rule
from gpuwatch.rulebook.rule import MINUTE

Series = Mapping[str, Sequence[float]]
"""Readings of one owner, one a minute. NaN stands for a minute without a reading."""

Seen = Callable[[Series], History]
"""Readings as a condition reads them: those of an owner, or of a rank beside its peers."""

NEAR = 0.07
"""How far a moved reading stays from a limit, as a share of it: nearer than any change of a limit that matters."""


@dataclass(frozen=True)
class Edge:
    """Two histories that differ in one series, so that the comparison holds on the one and not on the other."""

    part: Compare
    holds: Series
    fails: Series


def edge(rule: Rule, part: Compare, series: Series) -> Edge | None:
    """The edge of one comparison of the rule, near this example; None where no series of it can be moved there."""
    others = [other for other in parts_of(rule) if other != part]
    reading = [key for key in series if key.partition("{")[0] in part.metrics()]
    for seen in _focus(rule, series):
        moved = [found for key in reading if (found := _moved(part, key, series, seen)) is not None]

        def disturbed(found: Edge, seen: Seen = seen) -> int:
            # best is a series that no other comparison reads
            return sum(
                other.holds(seen(found.holds)) != other.holds(seen(found.fails))
                or other.holds(seen(found.fails)) != other.holds(seen(series))
                for other in others
            )

        if moved:
            return min(moved, key=disturbed)
    return None


def _focus(rule: Rule, series: Series) -> list[Seen]:
    """How to look at readings: as the first rank and place does where the rule holds; else as each of them in turn."""
    if not rule.across:
        return [history]
    views = rule.views(history(series))
    holding = [spot for spot, view in views.items() if rule.when.holds(view) is True]

    def look(spot: tuple[str, str]) -> Seen:
        return lambda readings: rule.views(history(readings)).get(spot, {})

    return [look(spot) for spot in (holding or views)]


def parts_of(rule: Rule) -> tuple[Compare, ...]:
    """Every comparison of the rule, each once."""
    conditions = [rule.when] if rule.critical_when is None else [rule.when, rule.critical_when]
    return tuple(dict.fromkeys(part for condition in conditions for part in comparisons(condition)))


def joins(condition: Condition) -> list[Joined]:
    """Every ``and`` of the condition, the outermost first."""
    if not isinstance(condition, Joined):
        return []
    inner = joins(condition.left) + joins(condition.right)
    return [condition, *inner] if condition.word == "and" else inner


def history(series: Series, minute: int | None = None) -> History:
    """The readings up to a minute (all by default), as samples."""
    upto = None if minute is None else minute + 1
    samples = {
        key: [(MINUTE * index, value) for index, value in enumerate(values[:upto]) if not math.isnan(value)]
        for key, values in series.items()
    }
    return {key: found for key, found in samples.items() if found}


def _moved(part: Compare, key: str, series: Series, seen: Seen) -> Edge | None:
    if isinstance(part.right, Const) and (part.symbol == "==" or part.right.number == 0):
        return _counted(part, key, series, part.right.number, seen)
    below, above = (_scaled(part, key, series, factor, seen) for factor in (1 - NEAR, 1 + NEAR))
    if below is None or above is None:
        return None
    return Edge(part, above, below) if part.symbol in (">", ">=") else Edge(part, below, above)


def _counted(part: Compare, key: str, series: Series, number: float, seen: Seen) -> Edge | None:
    """For a count or a switch the nearest other value is one more."""
    same, more = ({**series, key: (value,) * len(series[key])} for value in (number, number + 1))
    for holds, fails in ((same, more), (more, same)):
        if part.holds(seen(holds)) is True and part.holds(seen(fails)) is False:
            return Edge(part, holds, fails)
    return None


def _scaled(part: Compare, key: str, series: Series, factor: float, seen: Seen) -> Series | None:
    """The series with one of them scaled so that the left side is ``factor`` times the right one."""
    read = part.metrics()
    # A view of ranks needs the others too: they say which ranks and places there are.
    told = {k: v for k, v in series.items() if k.partition("{")[0] in read} if seen is history else series

    def excess(scale: float) -> float | None:
        moved = seen({**told, key: [value * scale for value in series[key]]})
        left, right = part.left.value(moved), part.right.value(moved)
        return None if left is None or not right else left / right - factor

    low, high = 1e-6, 1e6
    first, last = excess(low), excess(high)
    if first is None or last is None or first * last >= 0:
        return None
    for _ in range(44):  # to a part in 10^11 of a scale
        middle = math.sqrt(low * high)
        now = excess(middle)
        if now is None:
            return None
        low, high = (middle, high) if now * first > 0 else (low, middle)
    return {**series, key: [float(f"{value * high:.6g}") for value in series[key]]}
