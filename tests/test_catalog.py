"""The catalog keeps to Prometheus' conventions, and the names that users build on stay."""

from __future__ import annotations

import re

import pytest

from gpuwatch import catalog
from gpuwatch.catalog import METRICS, RANK_INFO
from gpuwatch.expr import Metric

BASE_UNITS = ("seconds", "bytes", "ratio", "celsius", "hertz", "watts", "joules")
KINDS = ("counter", "gauge", "histogram", "summary", "info")
RESERVED = {"job", "instance", "le", "quantile", "alertname", "alertstate", "severity", "hostname", "node"}
every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)


@every_metric
def test_names_and_help_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"gpuwatch_[a-z][a-z0-9_]*", metric.name) and "__" not in metric.name
    assert metric.kind in KINDS
    assert metric.help.endswith(".") and len(metric.help) > 10
    assert not re.search(r"_(milliseconds|ms|minutes|mib|gib|kilobytes|percent|mhz|mw)(_|$)", metric.name)


@every_metric
def test_the_suffix_says_the_kind(metric: Metric) -> None:
    assert metric.name.endswith("_total") is (metric.kind == "counter")
    assert metric.name.endswith("_info") is (metric.kind == "info")
    assert not metric.name.endswith(("_bucket", "_sum", "_count", "_created"))


@every_metric
def test_base_units_are_in_the_name(metric: Metric) -> None:
    if metric.unit in BASE_UNITS:
        assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    else:
        assert not metric.name.removesuffix("_total").endswith(tuple(f"_{unit}" for unit in BASE_UNITS))


@every_metric
def test_labels_are_plain_and_none_is_reserved(metric: Metric) -> None:
    owner = catalog.SCOPES[metric.scope]
    assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in metric.labels)
    assert not set(metric.labels) & set(owner)
    allowed = {"quantile"} if metric != RANK_INFO else {"node"}  # where a rank runs is part of who it is
    assert not set(metric.labels) & (RESERVED - allowed)
    # Prometheus keeps that label to summaries
    assert ("quantile" in metric.labels) is (metric.kind == "summary")
    assert not metric.only


def test_pid_and_restart_are_on_the_info_metric_alone() -> None:
    assert {name for name, metric in METRICS.items() if {"pid", "restart"} & set(metric.labels)} == {
        catalog.RANK_INFO.name
    }


def test_every_metric_is_listed_once_by_its_name() -> None:
    defined = [value for value in vars(catalog).values() if isinstance(value, Metric)]
    assert len(METRICS) == len(defined)
    assert all(METRICS[metric.name] is metric for metric in defined)


def test_the_bounds_of_the_step_histogram_grow() -> None:
    bounds = catalog.STEP_BOUNDS
    assert list(bounds) == sorted(set(bounds)) and bounds[0] > 0
