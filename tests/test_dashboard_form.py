"""The dashboards: their layout, what panels say and in which form, and what their queries read."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from dashboards.normalise import normalised
from dashboards.queries import RECORDED
from gpuwatch import catalog
from gpuwatch.render.conditions import limit, recorded
from gpuwatch.rulebook import RULES, RULES_BY_ID
from tests.boardpanels import BOARDS, PANELS, Json, every, every_board, every_panel, every_target

ROOT = Path(__file__).resolve().parent.parent
VARIABLES = {
    "gpuwatch-training": ["datasource", "job", "run", "rank", "runbooks"],
    "gpuwatch-memory": ["datasource", "job", "run", "rank", "runbooks"],
    "gpuwatch-data": ["datasource", "job", "run", "rank", "runbooks"],
    "gpuwatch-ranks": ["datasource", "job", "run", "rank", "runbooks"],
    "gpuwatch-hardware": ["datasource", "job", "node", "gpu", "runbooks"],
    "gpuwatch-fleet": ["datasource", "job", "run", "node", "gpu", "runbooks"],
}
BY_RANK = ("training", "memory", "data")
"""Dashboards on the chosen ranks, in which every query is narrowed to them."""
SUFFIXES = ("_bucket", "_sum", "_count")
JOINED = {"job", "instance", "le"}
"""Labels of every series beside the catalog's: the scrape's, and a histogram's."""


@every_board
def test_no_panel_leaves_the_grid_or_covers_another(board: Json) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"{one} covers {other}"


@every_board
def test_no_line_of_panels_leaves_a_hole(board: Json) -> None:
    widths: dict[int, int] = {}
    for panel in board["panels"]:
        widths[panel["gridPos"]["y"]] = widths.get(panel["gridPos"]["y"], 0) + panel["gridPos"]["w"]
    assert set(widths.values()) == {24}


@every("stat")
def test_a_numbers_title_fits_its_panel(panel: Json) -> None:
    # Seen at a width of 1300 pixels, where Grafana cuts off the twenty-first letter of four columns.
    assert len(panel["title"]) <= 5 * panel["gridPos"]["w"]


@every_board
def test_ids_and_titles_are_unique(board: Json) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)


@every_panel
def test_every_panel_says_what_it_shows_and_in_which_unit(panel: Json) -> None:
    assert panel["title"] and panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]


@every_target
def test_every_query_is_narrowed_by_the_variables(title: str, target: Json) -> None:
    expr = target["expr"]
    assert target["legendFormat"]
    assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for selector in re.findall(r"(?:gpuwatch_[\w:]+|ALERTS)(\{[^}]*\})?", expr):
        assert 'job=~"$job"' in selector, f"{title}: {expr}"
    if title.startswith(BY_RANK):
        assert 'run=~"$run"' in expr and 'rank=~"$rank"' in expr
    assert not re.search(r"\$__interval\b", expr)
    for inside in re.findall(r"(?:rate|increase)\([^\[]*\[([^\]]+)\]", expr):
        assert inside in ("$__rate_interval", "$__range", "5m"), f"{title}: a rate over {inside}"


@every_target
def test_every_query_reads_metrics_of_the_catalog_with_labels_they_have(title: str, target: Json) -> None:
    selectors = re.findall(r"\b(gpuwatch_\w+)\{([^}]*)\}", target["expr"])
    names = set(RECORDED.findall(target["expr"]))
    assert names <= {one.name for one in recorded(RULES)}
    assert selectors or names or "ALERTS" in target["expr"]
    for name, inside in selectors:
        base = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
        metric = catalog.METRICS.get(name) or catalog.METRICS[base]
        known = {*catalog.SCOPES[metric.scope], *metric.labels, *JOINED}
        assert {part.partition("=")[0].strip("~! ") for part in inside.split(",")} <= known, f"{title}: {inside}"
    counters = {name for name, _ in selectors if name.endswith(("_total", *SUFFIXES))}
    for name in counters - _raw_counters():
        assert re.search(rf"(rate|increase)\({name}", target["expr"]), (
            f"{title}: the counter {name} is shown without a rate"
        )


def _raw_counters() -> set[str]:
    # Shares of whole runs, how far ranks are apart, and what is rare and lasts are read as totals.
    whole = RULES_BY_ID["data-epoch-restart"].when.metrics()
    rare = (
        catalog.GUARD_FAULTS,
        catalog.WORKER_DEATHS,
        catalog.GPU_REMAPPED_ROWS,
        catalog.GPU_GRAVE_ERRORS,
        catalog.GPU_XID_ERRORS,
        catalog.GPU_ECC_CORRECTED,
        catalog.GPU_ECC_UNCORRECTED,
    )
    return {*whole, catalog.COLLECTIVES.name, *(metric.name for metric in rare)}


def test_the_limits_on_a_panel_are_those_of_its_rule() -> None:
    rule = RULES_BY_ID["data-stall"]
    panel = next(panel for panel in PANELS if f"({rule.id})" in panel["description"])
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert rule.critical_when is not None
    drawn = [(step["value"], step["color"]) for step in steps]
    assert drawn == [
        (None, "green"),
        (limit(rule.when, rule.value.expr), "orange"),
        (limit(rule.critical_when, rule.value.expr), "red"),
    ]
    assert panel["links"][0]["url"] == "${runbooks}data-stall.md"


@pytest.mark.parametrize("title", ["How long nothing has happened", "Since last progress"])
def test_the_limit_on_a_runs_silence_is_drawn(title: str) -> None:
    for panel in (panel for panel in PANELS if panel["title"] == title):
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1] == {"color": "red", "value": 300.0}


@every_board
def test_every_linked_runbook_exists(board: Json) -> None:
    linked = re.findall(r"\$\{runbooks\}([a-z0-9-]+)\.md", json.dumps(board))
    assert linked
    assert all((ROOT / "alerts" / "runbooks" / f"{id}.md").is_file() for id in linked)


def test_the_dashboards_keep_their_addresses() -> None:
    assert [board["uid"] for board in BOARDS] == list(VARIABLES)


@every_board
def test_a_dashboard_is_of_todays_schema(board: Json) -> None:
    assert board["schemaVersion"] == 39
    assert not {"rows", "style", "hideControls", "sharedCrosshair", "__inputs"} & board.keys()
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == VARIABLES[board["uid"]]
    for variable in board["templating"]["list"][1:-1]:
        assert variable["multi"] and variable["includeAll"] and variable["allValue"] == ".+"


def test_the_capacity_is_a_line_across_the_stack() -> None:
    panel = next(panel for panel in PANELS if panel["title"] == "What the device's memory is used for")
    (override,) = panel["fieldConfig"]["overrides"]
    target = next(target for target in panel["targets"] if target["refId"] == override["matcher"]["options"])
    assert "capacity" in target["expr"]
    assert {"id": "custom.stacking", "value": {"mode": "none", "group": "A"}} in override["properties"]


@every("table")
def test_a_table_shows_labels_as_they_are(panel: Json) -> None:
    # Grafana writes a label that looks like a number in the column's unit: rank 1 as 100 %, process 9707 as 9.71 K.
    assert panel["fieldConfig"]["defaults"]["unit"] == "string"
    renamed = panel["transformations"][1]["options"]["renameByName"]
    units = {
        override["matcher"]["options"]: property["value"]
        for override in panel["fieldConfig"]["overrides"]
        for property in override["properties"]
        if property["id"] == "unit"
    }
    assert list(units) == [renamed["Value"]] if "Value" in renamed else not units


@every("table")
def test_a_tables_columns_have_room(panel: Json) -> None:
    # Grafana gives a column without a width at least 150 pixels, and cuts off on the right what does not fit.
    widths = {
        override["matcher"]["options"]: property["value"]
        for override in panel["fieldConfig"]["overrides"]
        for property in override["properties"]
        if property["id"] == "custom.width"
    }
    headings = panel["transformations"][1]["options"]["renameByName"].values()
    pixels = panel["gridPos"]["w"] * 1500 / 24 - 24
    assert sum(widths.get(heading, 150) for heading in headings) <= pixels


@every("timeseries")
def test_an_axis_shows_zeros_and_the_first_limit(panel: Json) -> None:
    # Without an end, Grafana draws shares that are all zero on a scale up to 10,000 %, and limits only by luck.
    defaults = panel["fieldConfig"]["defaults"]
    end = defaults["custom"].get("axisSoftMax", defaults.get("max"))
    limits = [step["value"] for step in defaults.get("thresholds", {}).get("steps", [])[1:]]
    assert end > max(0, min(limits, default=0))
    assert end <= 1 or limits or defaults["unit"] != "percentunit"


@every_panel
def test_an_empty_panel_says_why(panel: Json) -> None:
    assert panel["type"] == "heatmap" or panel["fieldConfig"]["defaults"]["noValue"]


def test_an_unknown_kind_of_panel_is_refused() -> None:
    board = {"panels": [{"type": "graph"}], "templating": {"list": []}}
    with pytest.raises(ValueError, match="unknown kind of panel 'graph'"):
        normalised(board)
