"""PromQL for panels, from the catalog's metrics and the rulebook's expressions.

Every query is narrowed by the dashboard's variables. Readings of a GPU carry no run: they are shown for the nodes on
which the chosen ranks run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gpuwatch.catalog import METRICS, RANK_UP
from gpuwatch.expr import Expr, Metric, series_key

SELECTORS = {
    "rank": 'job=~"$job", run=~"$run", rank=~"$rank"',
    "gpu": 'job=~"$job"',
    "node": 'job=~"$job"',
}
"""The variables that narrow a metric, by its scope."""

ALONE = {
    "rank": 'job=~"$job", run=~"$run"',
    "gpu": 'job=~"$job", instance=~"$node", gpu=~"$gpu"',
    "node": 'job=~"$job", instance=~"$node"',
}
"""The same for dashboards on all runs, or on GPUs that may have no run."""

RATE_WINDOW = "$__rate_interval"

UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "celsius": "celsius",
    "hertz": "hertz",
    "watts": "watt",
}
"""Grafana's ids of the catalog's units."""

RECORDED = re.compile(r"\b\w+:gpuwatch_\w+:\w+")
"""Names of series that Prometheus computes by a recording rule."""

NAMED = 4
"""On more ranks or GPUs than these, a finding is one line with their number."""

ALERTS = 'ALERTS{alertname=~"Gpuwatch.+", alertstate="firing", %s}'


def select(metric: Metric, suffix: str = "") -> str:
    """The metric's series of the chosen ranks, or of their nodes; ``suffix`` is a histogram's ``_bucket`` and so on."""
    own = series_key("", dict(metric.only)).strip("{}")
    text = f"{metric.name}{suffix}{{{', '.join(part for part in (SELECTORS[metric.scope], own) if part)}}}"
    return text if metric.scope == "rank" else f"({text} and on (job, instance) {select(RANK_UP)})"


def rate(metric: Metric, suffix: str = "") -> str:
    """Growth per second of a rank's counter, over Grafana's own window."""
    if metric.scope != "rank":
        raise ValueError(f"{metric.name} is no reading of a rank: a rate of a joined selection is no valid query")
    return f"rate({select(metric, suffix)}[{RATE_WINDOW}])"


def plain(metric: Metric, suffix: str = "", but: str = "") -> str:
    """The metric's series of the chosen nodes, GPUs and runs, whether a rank is up there or not; ``but`` narrows."""
    own = series_key("", dict(metric.only)).strip("{}")
    return f"{metric.name}{suffix}{{{', '.join(part for part in (ALONE[metric.scope], own, but) if part)}}}"


def plain_rate(metric: Metric, suffix: str = "") -> str:
    """Growth per second of such a counter."""
    return f"rate({plain(metric, suffix)}[{RATE_WINDOW}])"


def quantile(share: float, metric: Metric) -> str:
    """A quantile of a histogram over the chosen ranks."""
    return f"histogram_quantile({share:g}, sum by (le) ({rate(metric, '_bucket')}))"


def narrowed(expr: Expr, variables: Mapping[str, str]) -> str:
    """An expression of the rulebook, as its rule reads it, narrowed by these variables."""
    text = RECORDED.sub(lambda found: f"{found[0]}{{{variables['rank']}}}", expr.promql())
    for name in expr.metrics():
        selectors = variables[METRICS[name].scope]
        text = re.sub(
            rf"(?<![\w:]){name}\b(?!:)(?:{{([^}}]*)}})?",
            lambda found, name=name, selectors=selectors: (  # type: ignore[misc]
                f"{name}{{{selectors}{', ' + found[1] if found[1] else ''}}}"
            ),
            text,
        )
    return text


def expression(expr: Expr) -> str:
    """The same for the chosen ranks, or their nodes."""
    text = narrowed(expr, SELECTORS)
    if all(METRICS[name].scope == "rank" for name in expr.metrics()):
        return text
    return f"{text} and on (job, instance) {select(RANK_UP)}"


def alerts(more: str = 'rule!=""') -> str:
    """The firing alerts of the chosen ranks, and of the GPUs of their nodes."""
    ranks = ALERTS % f"{SELECTORS['rank']}, {more}"
    gpus = ALERTS % f'{SELECTORS["gpu"]}, gpu!="", {more}'
    return f"{ranks} or ({gpus} and on (job, instance) {select(RANK_UP)})"


def worst_first(query: Callable[[str], str]) -> str:
    """A query for each severity in turn: a table keeps the order in which series come."""
    return " or ".join(query(f'severity="{severity}"') for severity in ("critical", "warning", "info"))


def gathered(alerts: str) -> str:
    """The alerts, those of one rule at one place on many ranks as one series: their number."""
    number = f"count by (severity, rule, run, where) ({alerts})"
    return f"({number} > {NAMED}) or ({alerts}) and on (severity, rule, run, where) ({number} <= {NAMED})"


def as_of_now(metric: Metric, growth: Metric | None = None) -> str:
    """What has come to since it was scraped, at its present speed (of ``growth``): nodes are scraped one by one."""
    age = f"(time() - timestamp({select(metric)}))"
    return f"({select(metric)} + {rate(growth or metric)} * {age})"


def ever(selection: str) -> str:
    """Those of the selected series that were above zero at any time of the range shown."""
    return f"{selection} and (max_over_time({selection}[$__range]) > 0)"
