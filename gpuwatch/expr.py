"""Conditions as data: one small tree with two readings.

``value(history)`` computes it in Python for the advisor and the reports; ``promql()`` writes it for Prometheus. Every
example in the rulebook is run through both, so that a mistake in one reading shows.

Unknown is not zero: a number that cannot be computed is ``None``, and a condition on it is ``None`` too (the rule
abstains).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Samples = Sequence[tuple[float, float]]
"""Readings of one series, oldest first, as (seconds, value)."""

History = Mapping[str, Samples]
"""What is known of one rank or one GPU: per series (see :func:`series_key`) its samples."""


def series_key(name: str, labels: Mapping[str, str] | None = None) -> str:
    """A series' name in a :data:`History`: ``name`` or ``name{a="1",b="2"}``, labels sorted and escaped."""
    if not labels:
        return name
    return name + "{" + ",".join(f'{label}="{escape(text)}"' for label, text in sorted(labels.items())) + "}"


def escape(text: str) -> str:
    """A label value as the Prometheus text format wants it."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Expr:
    """A number that both readings can compute."""

    def value(self, history: History) -> float | None:
        """The number now, or None when a signal is missing."""
        raise NotImplementedError

    def promql(self) -> str:
        """The same number for Prometheus."""
        raise NotImplementedError

    def metrics(self) -> frozenset[str]:
        """Names of the metrics it reads."""
        raise NotImplementedError

    def __add__(self, other: Expr | float) -> Expr:
        return BinOp("+", self, lift(other))

    def __sub__(self, other: Expr | float) -> Expr:
        return BinOp("-", self, lift(other))

    def __mul__(self, other: Expr | float) -> Expr:
        return BinOp("*", self, lift(other))

    def __truediv__(self, other: Expr | float) -> Expr:
        return BinOp("/", self, lift(other))

    def __gt__(self, limit: Expr | float) -> Condition:
        return Compare(self, ">", lift(limit))

    def __ge__(self, limit: Expr | float) -> Condition:
        return Compare(self, ">=", lift(limit))

    def __lt__(self, limit: Expr | float) -> Condition:
        return Compare(self, "<", lift(limit))

    def __le__(self, limit: Expr | float) -> Condition:
        return Compare(self, "<=", lift(limit))

    def equals(self, limit: float) -> Condition:
        """``==``, by name: dataclasses need the operator for themselves."""
        return Compare(self, "==", lift(limit))


@dataclass(frozen=True)
class Const(Expr):
    """A plain number."""

    number: float

    def value(self, history: History) -> float | None:
        return self.number

    def promql(self) -> str:
        # Every digit: with ``:g`` a limit of 2 GiB would be another one than in Python.
        return repr(self.number).removesuffix(".0")

    def metrics(self) -> frozenset[str]:
        return frozenset()


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


@dataclass(frozen=True)
class BinOp(Expr):
    """Arithmetic. Division by zero is unknown: Prometheus would call it infinite, so there its divisor is left out."""

    symbol: str
    left: Expr
    right: Expr

    def value(self, history: History) -> float | None:
        left, right = self.left.value(history), self.right.value(history)
        if left is None or right is None:
            return None
        if self.symbol == "+":
            return left + right
        if self.symbol == "-":
            return left - right
        if self.symbol == "*":
            return left * right
        return left / right if right else None

    def promql(self) -> str:
        right = self.right.promql()
        if self.symbol == "/" and not isinstance(self.right, Const):
            right = f"({right} != 0)"
        return f"({self.left.promql()} {self.symbol} {right})"

    def metrics(self) -> frozenset[str]:
        return self.left.metrics() | self.right.metrics()


class Condition:
    """True, False, or None when it cannot be told."""

    def holds(self, history: History) -> bool | None:
        """Whether it holds now."""
        raise NotImplementedError

    def promql(self, on: Sequence[str]) -> str:
        """The condition for Prometheus; ``on`` names the labels by which its parts are matched."""
        raise NotImplementedError

    def metrics(self) -> frozenset[str]:
        """Names of the metrics it reads."""
        raise NotImplementedError

    def __and__(self, other: Condition) -> Condition:
        return Joined("and", self, other)

    def __or__(self, other: Condition) -> Condition:
        return Joined("or", self, other)

    def unless(self, other: Condition) -> Condition:
        """This, except where ``other`` is known to hold: a missing signal on the right does not silence the left."""
        return Joined("unless", self, other)


@dataclass(frozen=True)
class Compare(Condition):
    """A number against a limit."""

    left: Expr
    symbol: str
    right: Expr

    def holds(self, history: History) -> bool | None:
        left, right = self.left.value(history), self.right.value(history)
        if left is None or right is None or math.isnan(left) or math.isnan(right):
            return None
        return {
            ">": left > right,
            ">=": left >= right,
            "<": left < right,
            "<=": left <= right,
            "==": left == right,
        }[self.symbol]

    def promql(self, on: Sequence[str]) -> str:
        return f"{self.left.promql()} {self.symbol} {self.right.promql()}"

    def metrics(self) -> frozenset[str]:
        return self.left.metrics() | self.right.metrics()


@dataclass(frozen=True)
class Joined(Condition):
    """Two conditions on the same rank or GPU; the value and the labels are the left one's."""

    word: str
    left: Condition
    right: Condition

    def holds(self, history: History) -> bool | None:
        left, right = self.left.holds(history), self.right.holds(history)
        if self.word == "unless":
            return left if right is not True else (None if left is None else False)
        decided = self.word == "or"
        if left is decided or right is decided:
            return decided
        return None if left is None or right is None else not decided

    def promql(self, on: Sequence[str]) -> str:
        matching = "" if self.word == "or" else f" on ({', '.join(on)})"
        return f"({self.left.promql(on)})\n{self.word}{matching}\n({self.right.promql(on)})"

    def metrics(self) -> frozenset[str]:
        return self.left.metrics() | self.right.metrics()


@dataclass(frozen=True)
class Quantity:
    """A number worth showing: what it is called in a text, how to compute it and in which unit."""

    name: str
    expr: Expr
    unit: str = field(default="1")


def lift(number: Expr | float) -> Expr:
    """A plain number as an expression."""
    return number if isinstance(number, Expr) else Const(float(number))


def _rate(samples: Samples) -> float | None:
    if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
        return None
    grown = 0.0
    for (_, before), (_, after) in itertools.pairwise(samples):
        grown += after - before if after >= before else after  # a counter that fell was reset
    return grown / (samples[-1][0] - samples[0][0])
