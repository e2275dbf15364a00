"""Panels and dashboards. The only file that touches grafanalib, which writes old forms: see ``normalise``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafanalib._gen import DashboardEncoder
from grafanalib.core import (
    Dashboard,
    GridPos,
    RowPanel,
    Stat,
    StateTimeline,
    Table,
    Target,
    Template,
    Templating,
    Threshold,
    Time,
    TimeSeries,
)
from grafanalib.core import (
    Panel as DrawnPanel,
)

from dashboards.normalise import normalised
from dashboards.options import (
    COLUMN_WIDTHS,
    HEATMAP,
    LINK,
    SEVERITIES,
    STRING,
    Limit,
    Link,
    States,
    alone,
    axis_end,
    by_name,
    colored,
    mapping,
    widths,
)

WIDTH = 24
"""Columns of Grafana's grid."""

SCHEMA_VERSION = 39
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class _Heatmap(DrawnPanel):  # type: ignore[misc]
    """A heat map of today; everything beyond its type comes in ``extraJson``."""

    def to_json_data(self) -> Any:
        return self.panel_json({"type": "heatmap"})


@dataclass(frozen=True)
class Query:
    """What a panel asks Prometheus, and how its series are called.

    A ``bound`` is what the others may come up to: a dashed line, in no stack.
    """

    expr: str
    legend: str
    bound: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel that has no place yet: ``draw`` makes it for a column and a line of the grid."""

    width: int
    height: int
    draw: Callable[[int, int], Any]


@dataclass(frozen=True)
class Variable:
    """A variable of the dashboard: the values of a label (``query``), or a text to edit (``text``)."""

    name: str
    label: str
    query: str = ""
    text: str = ""


def row(title: str) -> Panel:
    """A heading across the grid."""
    return Panel(WIDTH, 1, lambda x, y: RowPanel(title=title, gridPos=GridPos(h=1, w=WIDTH, x=x, y=y)))


def stat(
    title: str,
    description: str,
    query: Query,
    unit: str,
    *,
    width: int = 4,
    decimals: int | None = None,
    limits: Sequence[Limit] = (),
) -> Panel:
    """One number."""
    return Panel(
        width,
        4,
        lambda x, y: Stat(
            **_common(title, description, width, 4, x, y),
            targets=_targets([query]),
            format=unit,
            decimals=decimals,
            reduceCalc="lastNotNull",
            colorMode="value" if limits else "none",
            graphMode="none",
            noValue="no data",
            thresholds=_steps(limits),
        ),
    )


def timeseries(
    title: str,
    description: str,
    queries: Sequence[Query],
    unit: str,
    *,
    width: int = 12,
    stacked: bool = False,
    stairs: bool = False,
    top: int | None = None,
    limits: Sequence[Limit] = (),
    links: Sequence[Link] = (),
    colors: Mapping[str, str] | None = None,
    empty: str = "not measured",
) -> Panel:
    """Lines over time, ``stairs`` for what is counted; ``limits`` are drawn across them.

    ``top`` fixes the upper end of the axis, ``colors`` those of series by their name; ``empty`` is said where there is
    nothing to draw.
    """
    overrides = [alone(_letter(index)) for index, query in enumerate(queries) if query.bound]
    overrides += [colored(name, color) for name, color in (colors or {}).items()]
    soft = {} if top is not None else {"custom": {"axisSoftMax": axis_end(unit, limits)}}
    return Panel(
        width,
        8,
        lambda x, y: TimeSeries(
            **_common(title, description, width, 8, x, y),
            targets=_targets(queries),
            unit=unit,
            overrides=overrides,
            valueMin=0,
            valueMax=top,
            lineInterpolation="stepAfter" if stairs else "linear",
            fillOpacity=60 if stacked else 0,
            stacking={"mode": "normal", "group": "A"} if stacked else {"mode": "none"},
            showPoints="never",
            tooltipMode="multi",
            tooltipSort="desc",
            thresholds=_steps(limits),
            thresholdsStyleMode="dashed" if limits else "off",
            links=[{**LINK, "title": link.title, "url": link.url} for link in links],
            extraJson={"fieldConfig": {"defaults": {"noValue": empty, **soft}}},
        ),
    )


def statetimeline(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    states: States,
    width: int = WIDTH,
    height: int = 8,
    empty: str = "not measured",
) -> Panel:
    """A line per series whose color is its state; ``states`` maps values to a text and a color."""
    return Panel(
        width,
        height,
        lambda x, y: StateTimeline(
            **_common(title, description, width, height, x, y),
            targets=_targets(queries),
            mappings=[mapping(states)],
            thresholds=_base(),  # with Grafana's own, its legend would name those instead of the states
            showValue="never",
            extraJson={"fieldConfig": {"defaults": {"unit": "none", "noValue": empty}}},
        ),
    )


def heatmap(title: str, description: str, query: Query, unit: str, *, width: int = 24, height: int = 8) -> Panel:
    """A row per series whose color is its value: what differs among many ranks, at a glance."""
    # grafanalib draws the heat map of a Grafana long gone.
    drawn = {"options": {**HEATMAP, "cellValues": {"unit": unit}}, "fieldConfig": {"defaults": {"unit": unit}}}
    return Panel(
        width,
        height,
        lambda x, y: _Heatmap(
            **_common(title, description, width, height, x, y), targets=_targets([query]), extraJson=drawn
        ),
    )


def table(
    title: str,
    description: str,
    query: Query,
    *,
    columns: Mapping[str, str],
    unit: str = "none",
    states: States | None = None,
    width: int = WIDTH,
    height: int = 8,
    links: Mapping[str, Link] | None = None,
    empty: str = "none",
) -> Panel:
    """The present series as lines; ``columns`` maps the labels to show, in order, to their headings.

    ``unit`` and ``states`` are those of the series' number: labels are texts, also where they look like numbers.
    """
    hidden = {"Time": True, "__name__": True, **({} if "Value" in columns else {"Value": True})}
    shown = [
        {"id": "filterFieldsByName", "options": {"include": {"names": list(columns)}}},
        {
            "id": "organize",
            "options": {
                "excludeByName": hidden,
                "indexByName": {label: index for index, label in enumerate(columns)},
                "renameByName": dict(columns),
            },
        },
    ]
    overrides = [
        by_name(heading, _column(label, unit, states, (links or {}).get(label), label in widths(columns)))
        for label, heading in columns.items()
    ]
    return Panel(
        width,
        height,
        lambda x, y: Table(
            **_common(title, description, width, height, x, y),
            targets=_targets([query], instant=True),
            unit=STRING,
            overrides=overrides,
            transformations=shown,
            extraJson={"fieldConfig": {"defaults": {"noValue": empty}}},
        ),
    )


def _column(label: str, unit: str, states: States | None, link: Link | None, narrow: bool) -> dict[str, Any]:
    drawn: dict[str, Any] = {"noValue": ""}  # what an empty panel says is not for empty cells
    if narrow:
        drawn["custom.width"] = COLUMN_WIDTHS[label]
    if label == "Value":
        drawn["unit"] = unit
    if label == "where":
        drawn["custom.cellOptions"] = {"type": "auto", "wrapText": True}
    words = SEVERITIES if label == "severity" else states if label == "Value" else None
    if words:
        drawn |= {"mappings": [mapping(words)], "custom.cellOptions": {"type": "color-text"}}
    if link is not None:
        drawn["links"] = [{"title": link.title, "url": link.url, "targetBlank": True}]
    return drawn


def board(
    title: str, uid: str, description: str, variables: Sequence[Variable], panels: Sequence[Panel], tags: Sequence[str]
) -> str:
    """The dashboard as JSON: panels from left to right, a new line where one does not fit."""
    drawn = Dashboard(
        title=title,
        uid=uid,
        description=description,
        tags=list(tags),
        timezone="browser",
        editable=False,
        schemaVersion=SCHEMA_VERSION,
        refresh="30s",
        time=Time("now-1h", "now"),
        graphTooltip=1,
        templating=Templating(list=[_source(), *map(_variable, variables)]),
        panels=_placed(panels),
    ).auto_panel_ids()
    plain: dict[str, Any] = json.loads(json.dumps(drawn.to_json_data(), cls=DashboardEncoder))
    return json.dumps(normalised(plain), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _placed(panels: Sequence[Panel]) -> list[Any]:
    drawn, x, y, height = [], 0, 0, 0
    for panel in panels:
        if x + panel.width > WIDTH:
            x, y, height = 0, y + height, 0
        drawn.append(panel.draw(x, y))
        x, height = x + panel.width, max(height, panel.height)
    return drawn


def _common(title: str, description: str, width: int, height: int, x: int, y: int) -> dict[str, Any]:
    return {
        "title": title,
        "description": description,
        "dataSource": SOURCE,
        "gridPos": GridPos(h=height, w=width, x=x, y=y),
        "maxDataPoints": None,
    }


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _targets(queries: Sequence[Query], instant: bool = False) -> list[Any]:
    return [
        Target(
            expr=query.expr,
            legendFormat=query.legend,
            refId=_letter(index),
            datasource=SOURCE,
            instant=instant,
            format="table" if instant else "time_series",
        )
        for index, query in enumerate(queries)
    ]


def _steps(limits: Sequence[Limit]) -> list[Any]:
    if not limits:
        return []
    ordered = sorted(limits, key=lambda limit: limit.value)
    return [*_base(), *(Threshold(limit.color, index, float(limit.value)) for index, limit in enumerate(ordered, 1))]


def _base() -> list[Any]:
    return [Threshold("green", 0, 0.0)]  # its value is written as null: from minus infinity on


def _source() -> Any:
    return Template(name="datasource", label="Data source", type="datasource", query="prometheus")


def _variable(variable: Variable) -> Any:
    if not variable.query:
        return Template(
            name=variable.name, label=variable.label, type="textbox", query=variable.text, default=variable.text
        )
    return Template(
        name=variable.name,
        label=variable.label,
        query=variable.query,
        dataSource=SOURCE,
        includeAll=True,
        multi=True,
        allValue=".+",
        refresh=2,
    )
