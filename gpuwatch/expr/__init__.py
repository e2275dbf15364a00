"""Conditions as data: one small tree with two readings.

``value(history)`` computes it in Python for the advisor and the reports; ``promql()`` writes it for Prometheus. Every
example in the rulebook is run through both, so that a mistake in one reading shows.

Unknown is not zero: a number that cannot be computed is ``None``, and a condition on it is ``None`` too (the rule
abstains).
"""

from __future__ import annotations

from gpuwatch.expr.across import Across, Peered, Recorded, by_rank, of_place, of_run, places_of
from gpuwatch.expr.readings import SCOPES, AverageOverTime, Metric, Observed, Placed, Rate
from gpuwatch.expr.series import History, Samples, escape, series_key
from gpuwatch.expr.tree import BinOp, Compare, Condition, Const, Expr, Joined, Quantity, lift, matched

__all__ = [
    "SCOPES",
    "Across",
    "AverageOverTime",
    "BinOp",
    "Compare",
    "Condition",
    "Const",
    "Expr",
    "History",
    "Joined",
    "Metric",
    "Observed",
    "Peered",
    "Placed",
    "Quantity",
    "Rate",
    "Recorded",
    "Samples",
    "by_rank",
    "escape",
    "lift",
    "matched",
    "of_place",
    "of_run",
    "places_of",
    "series_key",
]
