"""grafanalib 0.7.1's JSON as Grafana's schema of today wants it (schemaVersion 39).

grafanalib writes fields that Grafana dropped, and some at places where nothing reads them any more. What is changed
here is only form: no panel, query or limit is added.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_BOARD_DROPPED = {"__inputs", "hideControls", "rows", "sharedCrosshair", "style", "gnetId"}
_PANEL_KEPT = {
    "type", "id", "targets", "title", "description", "transparent", "datasource", "gridPos", "links", "maxDataPoints",
    "transformations", "options", "fieldConfig",
}  # fmt: skip
_ROW_KEPT = {"type", "title", "gridPos", "id", "collapsed", "panels"}
_TARGET_DROPPED = {"metric", "query", "step", "target", "intervalFactor"}
_VARIABLE_DROPPED = {"tagValuesQuery", "tagsQuery", "useTags", "auto", "auto_min", "auto_count"}

# Grafana's own defaults, where the schema wants them spelled out.
_OPTIONS: dict[str, Json] = {
    "heatmap": {},
    "state-timeline": {},
    "stat": {"wideLayout": True, "showPercentChange": False, "percentChangeColorMode": "standard"},
    "table": {"frameIndex": 0, "cellHeight": "sm"},
    "timeseries": {},
}


def normalised(board: Json) -> Json:
    """The dashboard in today's form.

    Raises ValueError on a kind of panel that it does not know.
    """
    fresh = {key: value for key, value in _without_nulls(board).items() if key not in _BOARD_DROPPED}
    fresh["panels"] = [_panel(panel) for panel in fresh["panels"]]
    fresh.get("timepicker", {}).pop("time_options", None)
    fresh["templating"]["list"] = [_variable(variable) for variable in fresh["templating"]["list"]]
    return fresh


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _panel(panel: Json) -> Json:
    kind = panel["type"]
    if kind == "row":
        return {"collapsed": False, "panels": [], **{key: panel[key] for key in panel.keys() & _ROW_KEPT}}
    if kind not in _OPTIONS:
        raise ValueError(f"unknown kind of panel {kind!r}: teach dashboards/normalise.py its options first")
    fresh = {key: value for key, value in panel.items() if key in _PANEL_KEPT}
    fresh["fieldConfig"] = _fields(kind, panel)
    options = fresh.setdefault("options", {})
    if kind in ("timeseries", "state-timeline"):
        options.setdefault("tooltip", {}).setdefault("sort", "none")
        legend = options.setdefault("legend", {})
        legend.setdefault("showLegend", legend.get("displayMode") != "hidden")
        legend.setdefault("calcs", [])
    for key, value in _OPTIONS[kind].items():
        options.setdefault(key, value)
    fresh["targets"] = [_target(target) for target in panel.get("targets", [])]
    return fresh


def _fields(kind: str, panel: Json) -> Json:
    fields: Json = panel.get("fieldConfig", {})
    fields.setdefault("overrides", [])
    defaults = fields.setdefault("defaults", {})
    steps = defaults.pop("thresholds", {}).get("steps") or []
    if steps:
        defaults["thresholds"] = {"mode": "absolute", "steps": [_step(step) for step in steps]}
    if kind == "table":
        custom = defaults.setdefault("custom", {})
        custom.setdefault("inspect", False)
        custom["cellOptions"] = {"type": custom.pop("displayMode", "auto")}
    return fields


def _step(step: Json) -> Json:
    # grafanalib writes the base step's value as the text "null"
    value = step.get("value")
    return {"color": step["color"], "value": None if value in ("null", None) else value}


def _target(target: Json) -> Json:
    fresh = {key: value for key, value in target.items() if key not in _TARGET_DROPPED and value != ""}
    fresh.setdefault("range", not fresh.get("instant"))
    fresh.setdefault("editorMode", "code")
    return fresh


def _variable(variable: Json) -> Json:
    fresh = {key: value for key, value in variable.items() if key not in _VARIABLE_DROPPED}
    current = {key: value for key, value in fresh.pop("current", {}).items() if key != "tags"}
    if "text" in current:
        fresh["current"] = current
    if fresh["type"] == "textbox":
        fresh["options"] = [{**current, "selected": True}]
    return fresh
