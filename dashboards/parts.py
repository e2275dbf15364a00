"""Parts that dashboards share: their variables, panels of metrics as they are, panels of a rule with its limits."""

from __future__ import annotations

from dashboards.options import COLORS, Limit, Link
from dashboards.panels import Panel, Query, Variable, timeseries
from dashboards.queries import UNITS, expression, select
from gpuwatch.catalog import RANK_UP
from gpuwatch.expr import BinOp, Const, Expr, Metric
from gpuwatch.render.conditions import limit
from gpuwatch.render.runbooks import RUNBOOKS
from gpuwatch.rulebook import RULES_BY_ID

RANK = "{{run}} rank {{rank}}"
GPU = "{{instance}} gpu {{gpu}}"

_PLAIN = {"host", "device", "gpu", "memory", "loader", "worker", "shared"}
"""Words of a metric's name that its panel's title says."""

VARIABLES = (
    Variable("job", "Job", f"label_values({RANK_UP.name}, job)"),
    Variable("run", "Run", f'label_values({RANK_UP.name}{{job=~"$job"}}, run)'),
    Variable("rank", "Rank", f'label_values({RANK_UP.name}{{job=~"$job", run=~"$run"}}, rank)'),
    Variable("runbooks", "Runbooks at", text=RUNBOOKS),
)
"""What every dashboard is narrowed by."""


def metrics(
    title: str, shown: list[Metric], legend: str, *, width: int = 12, bound: Metric | None = None, of: str = ""
) -> Panel:
    """A panel of gauges as they are; where there are several, the legend says which.

    ``bound`` is what they may come up to: for each series a line, or one for each value of the label ``of``.
    """
    alone = len(shown) == 1
    queries = [Query(select(metric), legend if alone else f"{legend} {_short(metric)}") for metric in shown]
    if bound is not None:
        expr, name = (f"max by ({of}) ({select(bound)})", f"{{{{{of}}}}}") if of else (select(bound), legend)
        queries.append(Query(expr, f"{name} {_short(bound)}", bound=True))
        shown = [*shown, bound]
    return timeseries(
        title, " ".join(metric.help for metric in shown), queries, UNITS.get(shown[0].unit, "none"), width=width
    )


def rule_panel(id: str, title: str, legend: str = RANK) -> Panel:
    """A rule's number with the rule's limits drawn on it."""
    rule = RULES_BY_ID[id]
    return timeseries(
        title,
        f"{rule.title} ({rule.id}). {rule.because}",
        [Query(expression(rule.value.expr), legend)],
        UNITS.get(rule.value.unit, "none"),
        limits=limits(id, rule.value.expr),
        links=[runbook(rule.id)],
    )


def runbook(id: str) -> Link:
    """The link to a rule's runbook."""
    return Link(f"Runbook: {id}", f"${{runbooks}}{id}.md")


def limits(id: str, expr: Expr) -> tuple[Limit, ...]:
    """The rule's limits on this number, in the colors of their severity."""
    rule = RULES_BY_ID[id]
    conditions = [(rule.severity, rule.when)]
    if rule.critical_when is not None:
        conditions.append(("critical", rule.critical_when))
    sides = dict.fromkeys((expr, _bare(expr)))
    found = ((severity, limit(condition, side)) for severity, condition in conditions for side in sides)
    return tuple(Limit(number, COLORS[severity]) for severity, number in found if number is not None)


def _bare(expr: Expr) -> Expr:
    """Without a ``x * 0 +`` before it, which gives a number the labels of x."""
    if not isinstance(expr, BinOp) or expr.symbol != "+" or not isinstance(expr.left, BinOp):
        return expr
    return expr.right if expr.left.symbol == "*" and expr.left.right == Const(0) else expr


def _short(metric: Metric) -> str:
    words = metric.name.removeprefix("gpuwatch_").removesuffix(f"_{metric.unit}").split("_")
    return " ".join(word for word in words if word not in _PLAIN) or "used"
