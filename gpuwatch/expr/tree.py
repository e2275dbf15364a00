"""The tree: numbers, arithmetic on them, comparisons, and comparisons joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuwatch.expr.series import History


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

    def grouping(self) -> tuple[str, ...] | None:
        """The labels that tell its series apart, ``instance`` first where they carry it; None for a plain number."""
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

    def grouping(self) -> tuple[str, ...] | None:
        return None


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
        left, right = _once(self.left, self.right, self.left.promql()), _once(self.right, self.left, right)
        return f"({left} {self.symbol}{matched(self.left, self.right)} {right})"

    def metrics(self) -> frozenset[str]:
        return self.left.metrics() | self.right.metrics()

    def grouping(self) -> tuple[str, ...] | None:
        return _wider(self.left, self.right)


class Condition:
    """True, False, or None when it cannot be told."""

    def holds(self, history: History) -> bool | None:
        """Whether it holds now."""
        raise NotImplementedError

    def promql(self, on: Sequence[str]) -> str:
        """The condition for Prometheus; ``on`` names the labels by which its parts are matched."""
        raise NotImplementedError

    def grouping(self) -> tuple[str, ...] | None:
        """The labels that tell its series apart, as of :meth:`Expr.grouping`."""
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
        left, right = (_once(*sides, sides[0].promql()) for sides in ((self.left, self.right), (self.right, self.left)))
        return f"{left} {self.symbol}{matched(self.left, self.right)} {right}"

    def grouping(self) -> tuple[str, ...] | None:
        return _wider(self.left, self.right)

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
        # What both sides carry: a condition on the run as a whole joins each of its ranks.
        one, other = self.left.grouping(), self.right.grouping()
        shared = on if one is None or other is None else [label for label in one if label in other]
        matching = "" if self.word == "or" else f" on ({', '.join(shared)})"
        return f"({self.left.promql(on)})\n{self.word}{matching}\n({self.right.promql(on)})"

    def grouping(self) -> tuple[str, ...] | None:
        return self.left.grouping()

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


def matched(left: Expr | Condition, right: Expr | Condition) -> str:
    """How Prometheus must pair the series of two sides that carry different labels; empty where they carry the same."""
    one, other = left.grouping(), right.grouping()
    if one is None or other is None or set(one) == set(other):
        return ""
    shared = ", ".join(label for label in one if label in other)
    return f" on ({shared}) group_{'left' if len(one) > len(other) else 'right'} ()"


def _once(side: Expr, other: Expr, text: str) -> str:
    """A side that is paired with several series of the other, with one series for each.

    Where two jobs scrape one daemon, its series are there twice, and Prometheus would not compute the rule for any run.
    """
    own, more = side.grouping() or (), other.grouping() or ()
    return f"max by ({', '.join(own)}) ({text})" if "instance" in own and len(own) < len(more) else text


def _wider(left: Expr, right: Expr) -> tuple[str, ...] | None:
    one, other = left.grouping(), right.grouping()
    return one if other is None or (one is not None and len(one) >= len(other)) else other
