"""What a rank's numbers are beside those of the other ranks of its run.

For Prometheus that is an aggregation over the series of the run. In Python it is computed from a :class:`Peered`
history: that of one rank, which knows those of all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gpuwatch import means
from gpuwatch.expr.series import History, Samples, series_key
from gpuwatch.expr.tree import Expr

RUN, RANK = "run", "rank"

_PYTHON: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "sum": math.fsum,
    "avg": means.mean,
    "median": means.median,
    "count": len,
}
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Peered(dict[str, Samples]):
    """The history of one rank (empty for the run as a whole) with ``peers``, those of all its ranks, its own too.

    What was computed of all ranks is kept in ``shared``, which the ranks of a run have in common: without it the cost
    would grow with the square of their number.
    """

    def __init__(self, own: History, peers: Sequence[History], shared: dict[object, Any] | None = None) -> None:
        super().__init__(own)
        self.peers = tuple(peers)
        self.shared: dict[object, Any] = {} if shared is None else shared


@dataclass(frozen=True)
class Across(Expr):
    """A number over all ranks of a run: max, min, sum, avg, median, or the count of ranks where it is known."""

    how: str
    expr: Expr

    def value(self, history: History) -> float | None:
        if not isinstance(history, Peered):
            return self._over((history,))
        if self not in history.shared:
            history.shared[self] = self._over(history.peers)
        found: float | None = history.shared[self]
        return found

    def _over(self, peers: Sequence[History]) -> float | None:
        known = [number for peer in peers if (number := self.expr.value(peer)) is not None]
        return float(_PYTHON[self.how](known)) if known else None

    def promql(self) -> str:
        by = ", ".join(self.grouping())
        if self.how == "median":
            return f"quantile by ({by}) (0.5, {self.expr.promql()})"
        return f"{self.how} by ({by}) ({self.expr.promql()})"

    def metrics(self) -> frozenset[str]:
        return self.expr.metrics()

    def grouping(self) -> tuple[str, ...]:
        # Not by the scrape's instance: the ranks of a run may be on many nodes.
        return tuple(label for label in self.expr.grouping() or () if label not in ("instance", RANK))


@dataclass(frozen=True)
class Recorded(Expr):
    """A number that Prometheus keeps as a series of its own, for alerts and panels that read it again and again."""

    name: str
    expr: Expr

    def value(self, history: History) -> float | None:
        return self.expr.value(history)

    def promql(self) -> str:
        return self.name

    def metrics(self) -> frozenset[str]:
        return self.expr.metrics()

    def grouping(self) -> tuple[str, ...] | None:
        return self.expr.grouping()


# The same few keys are read again and again.
@lru_cache(maxsize=4096)
def _labels(key: str) -> tuple[tuple[str, str], ...]:
    """The labels that a key carries."""
    return tuple(_LABEL.findall(key))


@lru_cache(maxsize=4096)
def _parted(key: str) -> tuple[str, str]:
    """The rank that a key carries, 0 where it has none, and the key without it."""
    name, _, rest = key.partition("{")
    labels = dict(_labels(rest))
    return labels.pop(RANK, "0"), series_key(name, labels)


def by_rank(series: Mapping[str, Samples]) -> dict[str, History]:
    """A run's history whose keys carry ``rank``, as histories of its ranks."""
    ranks: dict[str, dict[str, Samples]] = {}
    for key, samples in series.items():
        rank, own = _parted(key)
        ranks.setdefault(rank, {})[own] = samples
    return dict(ranks)


def of_run(series: Mapping[str, Samples]) -> Peered:
    """A run's history as one of the run as a whole: what carries no ``rank`` is its own."""
    own = {key: samples for key, samples in series.items() if f'{RANK}="' not in key}
    ranked = {key: samples for key, samples in series.items() if key not in own}
    return Peered(own, list(by_rank(ranked or own).values()))


def places_of(history: History, label: str) -> list[str]:
    """The values of this label among the series of a history."""
    found = (dict(_labels(key)).get(label) for key in history)
    return list(dict.fromkeys(place for place in found if place is not None))


def of_place(history: History, label: str, place: str) -> History:
    """The history without the series of other places: those whose ``label`` has another value."""
    mine, any_place = f'{label}="{place}"', f'{label}="'
    kept = {key: samples for key, samples in history.items() if any_place not in key or mine in key}
    if not isinstance(history, Peered):
        return kept
    if (label, place) not in history.shared:
        history.shared[label, place] = [of_place(peer, label, place) for peer in history.peers], {}
    peers, shared = history.shared[label, place]
    return Peered(kept, peers, shared)
