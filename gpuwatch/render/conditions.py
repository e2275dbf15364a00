"""Looking into a rule's condition: its comparisons, the number it shows, the limit on a quantity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuwatch.expr import Across, BinOp, Compare, Condition, Const, Expr, Joined, Recorded
from gpuwatch.rulebook import Rule


def comparisons(condition: Condition) -> list[Compare]:
    """Every comparison in the condition, left to right."""
    if isinstance(condition, Compare):
        return [condition]
    if isinstance(condition, Joined):
        return comparisons(condition.left) + comparisons(condition.right)
    raise TypeError(f"unknown kind of condition: {condition!r}")


def shown(condition: Condition) -> set[Expr]:
    """What Prometheus gives as the value of the condition: the left side of its first comparison, of each ``or``."""
    if isinstance(condition, Compare):
        return {condition.left}
    if isinstance(condition, Joined):
        return shown(condition.left) | (shown(condition.right) if condition.word == "or" else set())
    raise TypeError(f"unknown kind of condition: {condition!r}")


def limit(condition: Condition, expr: Expr) -> float | None:
    """The limit beyond which the condition can hold for ``expr``; None where it has none.

    Parts joined by ``and`` must all hold, so the strictest limit counts; of parts joined by ``or`` the loosest does.
    Only lower limits (``>`` and ``>=``) are looked at: those are what a panel draws.
    """
    if isinstance(condition, Compare):
        if condition.left == expr and condition.symbol in (">", ">=") and isinstance(condition.right, Const):
            return condition.right.number
        return None
    if isinstance(condition, Joined):
        sides = (condition.left,) if condition.word == "unless" else (condition.left, condition.right)
        limits = [number for side in sides if (number := limit(side, expr)) is not None]
        if not limits or (condition.word == "or" and len(limits) < 2):
            return None
        return min(limits) if condition.word == "or" else max(limits)
    raise TypeError(f"unknown kind of condition: {condition!r}")


def recorded(rules: Iterable[Rule]) -> list[Recorded]:
    """What Prometheus must record for these rules, each once, in the order of their use."""
    read = [
        expr
        for rule in rules
        for condition in (rule.when, rule.critical_when)
        if condition is not None
        for expr in (*(side for part in comparisons(condition) for side in (part.left, part.right)), rule.value.expr)
    ]
    return list(dict.fromkeys(part for expr in read for part in within(expr) if isinstance(part, Recorded)))


def within(expr: Expr) -> Iterator[Expr]:
    """An expression's parts and itself, each after what it is made of."""
    if isinstance(expr, BinOp):
        yield from within(expr.left)
        yield from within(expr.right)
    if isinstance(expr, (Across, Recorded)):
        yield from within(expr.expr)
    yield expr


def pinned(rule: Rule) -> bool:
    """Whether the condition asks for one exact value of the rule's number, so that it says nothing to show it."""
    return any(part.left == rule.value.expr and part.symbol == "==" for part in comparisons(rule.when))


def promql(rule: Rule, condition: Condition) -> str:
    """The condition for Prometheus, with the rule's own number as its value."""
    on = rule.matched_by
    text = condition.promql(on)
    if shown(condition) == {rule.value.expr}:
        return text
    return f"({rule.value.expr.promql()})\nand on ({', '.join(on)})\n({text})"
