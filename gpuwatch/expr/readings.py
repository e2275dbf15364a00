"""What a condition reads: metrics, their growth, their means, what hooks observed."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from gpuwatch.expr.series import History, Samples, escape, series_key
from gpuwatch.expr.tree import Expr

SCOPES: dict[str, tuple[str, ...]] = {
    "rank": ("run", "rank"),
    "gpu": ("gpu", "uuid"),
    "node": (),
    "peer": ("run", "rank"),
    "run": ("run",),
}
"""Which labels identify the owner of a reading, and of a rule: a ``peer`` is a rank beside the others of its run."""


@dataclass(frozen=True)
class Metric(Expr):
    """One family of series: what is published and what rules read.

    ``labels`` are its own labels, beside those of its ``scope`` (``rank``: run, rank; ``gpu``: gpu, uuid; ``node``:
    none). ``only`` narrows it to some label values; several series left over are summed (counters) or the largest
    counts (gauges).
    """

    name: str
    kind: str
    unit: str
    help: str
    scope: str = "rank"
    labels: tuple[str, ...] = ()
    only: tuple[tuple[str, str], ...] = ()

    def where(self, **labels: str) -> Metric:
        """The same metric, narrowed to these label values."""
        return Metric(
            self.name, self.kind, self.unit, self.help, self.scope, self.labels, self.only + tuple(labels.items())
        )

    def select(self, history: History) -> list[Samples]:
        """The series in ``history`` that belong to this metric and carry the wanted label values."""
        wanted = [f'{label}="{escape(text)}"' for label, text in self.only]
        found = []
        for key, samples in history.items():
            name, _, rest = key.partition("{")
            if samples and name == self.name and all(part in rest for part in wanted):
                found.append(samples)
        return found

    def value(self, history: History) -> float | None:
        return self._join([samples[-1][1] for samples in self.select(history)])

    def promql(self) -> str:
        return self._without(self.selector())

    def selector(self) -> str:
        """``name{label="value"}`` with the wanted label values."""
        return series_key(self.name, dict(self.only))

    def metrics(self) -> frozenset[str]:
        return frozenset({self.name})

    def grouping(self) -> tuple[str, ...] | None:
        # What concerns a run as a whole was computed by Prometheus, and is of no scrape.
        return SCOPES[self.scope] if self.scope == "run" else ("instance", *SCOPES[self.scope])

    def _join(self, values: list[float]) -> float | None:
        if not values:
            return None
        return math.fsum(values) if self.kind == "counter" else max(values)

    def _without(self, promql: str) -> str:
        # Own labels go, so that both sides of an operator carry the same ones.
        if not self.labels:
            return promql
        joined = "sum" if self.kind == "counter" else "max"
        return f"{joined} without ({', '.join(self.labels)}) ({promql})"


@dataclass(frozen=True)
class Observed(Expr):
    """The magnitude of what a hook observed for a rule; keeps the place in the alert's labels."""

    metric: Metric
    rule: str

    def value(self, history: History) -> float | None:
        return self.metric.where(rule=self.rule).value(history)

    def promql(self) -> str:
        return self.metric.where(rule=self.rule).selector()

    def metrics(self) -> frozenset[str]:
        return self.metric.metrics()

    def grouping(self) -> tuple[str, ...] | None:
        return self.metric.grouping()


@dataclass(frozen=True)
class Placed(Expr):
    """A metric of one label, at each value of it apart (a phase, say); the label stays on the alert."""

    metric: Metric

    @property
    def label(self) -> str:
        """The label that names the place."""
        return self.metric.labels[0]

    def value(self, history: History) -> float | None:
        return self.metric.value(history)

    def promql(self) -> str:
        return self.metric.selector()

    def metrics(self) -> frozenset[str]:
        return self.metric.metrics()

    def grouping(self) -> tuple[str, ...] | None:
        return ("instance", *SCOPES[self.metric.scope], self.label)


@dataclass(frozen=True)
class Rate(Expr):
    """Growth per second of a counter: over the last minutes for Prometheus, over the whole history in Python."""

    metric: Metric
    minutes: int = 5

    def value(self, history: History) -> float | None:
        rates = [rate for samples in self.metric.select(history) if (rate := _rate(samples)) is not None]
        return math.fsum(rates) if rates else None

    def promql(self) -> str:
        return self.metric._without(f"rate({self.metric.selector()}[{self.minutes}m])")

    def metrics(self) -> frozenset[str]:
        return self.metric.metrics()

    def grouping(self) -> tuple[str, ...] | None:
        return self.metric.grouping()


@dataclass(frozen=True)
class AverageOverTime(Expr):
    """Mean of a gauge over the last minutes."""

    metric: Metric
    minutes: int = 5

    def value(self, history: History) -> float | None:
        means = []
        for samples in self.metric.select(history):
            # (now - minutes, now], as Prometheus selects a range
            recent = [number for when, number in samples if when > samples[-1][0] - 60 * self.minutes]
            means.append(math.fsum(recent) / len(recent))
        return max(means) if means else None

    def promql(self) -> str:
        return self.metric._without(f"avg_over_time({self.metric.selector()}[{self.minutes}m])")

    def metrics(self) -> frozenset[str]:
        return self.metric.metrics()

    def grouping(self) -> tuple[str, ...] | None:
        return self.metric.grouping()


def _rate(samples: Samples) -> float | None:
    if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
        return None
    grown = 0.0
    for (_, before), (_, after) in itertools.pairwise(samples):
        grown += after - before if after >= before else after  # a counter that fell was reset
    return grown / (samples[-1][0] - samples[0][0])
