"""The rules of grafana/dashboard-linter (by their names there), on every dashboard; exceptions carry their reason.

Three of the seventeen are not here: ``target-logql-rule`` and ``target-logql-auto-rule`` (there are no logs), and
``target-promql-rule``, which a real Prometheus checks in test_dashboards.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "dashboards" / "json").glob("*.json"))
every_board = pytest.mark.parametrize(
    "board", [json.loads(file.read_text("utf-8")) for file in FILES], ids=lambda b: b["uid"]
)

NO_INSTANCE = {
    "gpuwatch-training": "a run's ranks are chosen, wherever they are",
    "gpuwatch-memory": "a run's ranks are chosen, wherever they are",
    "gpuwatch-data": "a run's ranks are chosen, wherever they are",
    "gpuwatch-ranks": "a run's ranks are chosen, wherever they are",
}
"""Dashboards without a variable for the instance (here called node), and why."""

TOTALS_AS_THEY_ARE = {
    "gpuwatch_guard_faults_total": "a handful in a run",
    "gpuwatch_loader_worker_deaths_total": "a handful in a run",
    "gpuwatch_collectives_total": "how far ranks are apart is a difference of totals",
    "gpuwatch_gpu_remapped_rows_total": "a handful in a device's life",
    "gpuwatch_gpu_grave_errors_total": "a handful in a device's life",
    "gpuwatch_gpu_xid_errors_total": "a handful in a device's life",
    "gpuwatch_gpu_ecc_corrected_total": "each of them is an event",
    "gpuwatch_gpu_ecc_uncorrected_total": "a handful in a device's life",
    "gpuwatch_epoch_restarts_total": "a share of the whole run",
    "gpuwatch_epoch_restart_seconds_total": "a share of the whole run",
    "gpuwatch_epoch_start_seconds_total": "a share of the whole run",
    "gpuwatch_phase_seconds_total": "a share of the whole run",
}
"""Counters that some panel shows as totals, and why."""


def panels(board: Json) -> list[Json]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board: Json) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel["targets"]]


def variables(board: Json) -> dict[str, Json]:
    return {variable["name"]: variable for variable in board["templating"]["list"]}


@every_board
def test_template_datasource_rule(board: Json) -> None:
    (source,) = [variable for variable in variables(board).values() if variable["type"] == "datasource"]
    assert (source["name"], source["query"], source["label"]) == ("datasource", "prometheus", "Data source")


@every_board
@pytest.mark.parametrize("name", ["job", "node"])
def test_template_job_rule_and_template_instance_rule(board: Json, name: str) -> None:
    if name == "node" and board["uid"] in NO_INSTANCE:
        assert name not in variables(board)
        return
    variable = variables(board)[name]
    assert variable["type"] == "query" and variable["datasource"]["uid"] == "${datasource}"
    assert variable["multi"] and variable["includeAll"] and variable["allValue"] == ".+" and variable["label"]


@every_board
def test_template_label_promql_rule(board: Json) -> None:
    for variable in variables(board).values():
        if variable["type"] == "query":
            assert re.fullmatch(r"label_values\(gpuwatch_\w+(\{[^{}]*\})?, \w+\)", variable["query"]), variable["name"]


@every_board
def test_template_on_time_change_reload_rule(board: Json) -> None:
    assert all(variable["refresh"] == 2 for variable in variables(board).values() if variable["type"] == "query")


@every_board
def test_panel_datasource_rule(board: Json) -> None:
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels(board))


@every_board
def test_panel_title_description_rule_and_panel_units_rule_and_panel_no_targets_rule(board: Json) -> None:
    for panel in panels(board):
        assert panel["title"] and panel["description"]
        assert panel["targets"], panel["title"]
        assert panel["fieldConfig"]["defaults"].get("unit"), panel["title"]


@every_board
def test_target_rate_interval_rule(board: Json) -> None:
    for query in queries(board):
        for window in re.findall(r"\b(?:rate|irate)\([^\[]*\[([^\]]+)\]", query):
            # A rule's own number is shown over the rule's own window.
            assert window in ("$__rate_interval", "5m"), query


@every_board
def test_target_job_rule_and_target_instance_rule(board: Json) -> None:
    matchers = ['job=~"$job"'] if board["uid"] in NO_INSTANCE else ['job=~"$job"', 'instance=~"$node"']
    for query in queries(board):
        for selector in re.findall(r"(?:[\w:]*gpuwatch_[\w:]+|ALERTS)(\{[^}]*\})?", query):
            assert matchers[0] in selector, query
            # What belongs to a run is chosen by the run, on the dashboard of the whole fleet.
            assert all(matcher in selector for matcher in matchers) or 'run=~"$run"' in selector, query


@every_board
def test_target_counter_agg_rule(board: Json) -> None:
    for query in queries(board):
        for name in re.findall(r"\bgpuwatch_\w+_(?:total|sum|count|bucket)\b(?!:)", query):
            assert re.search(rf"\b(rate|irate|increase)\({name}\b", query) or name in TOTALS_AS_THEY_ARE, query


@every_board
def test_uneditable_dashboard_rule(board: Json) -> None:
    assert board["editable"] is False
