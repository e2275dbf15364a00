"""What panels say beyond their queries: ends of axes, overrides, words and colors of values, widths of columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
States = Mapping[float | str, tuple[str, str]]
"""A text and a color by value."""

COLORS = {"info": "blue", "warn": "orange", "critical": "red"}
"""By severity."""

SEVERITIES: States = {"critical": ("critical", "red"), "warning": ("warning", "orange"), "info": ("info", "blue")}
"""As alerts call them."""

PHASES = {"forward": "blue", "backward": "purple", "optimizer": "green", "data": "orange", "other": "#808080"}
"""The same phase has the same color everywhere; orange is what waits."""

STRING = "string"
"""Grafana's unit of texts. Under any other, a label that looks like a number is written as one: rank 1 as 100%."""

COLUMN_WIDTHS = {
    "severity": 90,
    "rule": 215,
    "rank": 60,
    "gpu": 55,
    "phase": 100,
    "local_rank": 95,
    "world_size": 95,
    "pid": 85,
    "restart": 85,
    "torch": 130,
    "pci_bus_id": 150,
    "name": 190,
    "uuid": 360,
    "Value": 125,
}
"""In pixels, by label, where it is known how long texts get. Grafana gives each other column at least 150."""

_AXIS_ENDS = {"percentunit": 0.01, "s": 0.001, "bytes": 1024.0, "Bps": 1000.0}
"""What an axis shows at least, by unit, so that zeros are not drawn on a scale up to 10,000 %."""

LINK = {
    "type": "link",
    "targetBlank": True,
    "icon": "external link",
    "tooltip": "",
    "tags": [],
    "asDropdown": False,
    "includeVars": False,
    "keepTime": False,
}
"""What Grafana's schema wants of every link."""

HEATMAP: Json = {
    "calculate": False,
    "cellGap": 1,
    "color": {"mode": "scheme", "scheme": "Oranges", "fill": "dark-orange", "scale": "exponential", "exponent": 0.5,
              "steps": 64, "reverse": False},
    "exemplars": {"color": "rgba(255,0,255,0.7)"},
    "filterValues": {"le": 1e-9},
    "legend": {"show": True},
    "rowsFrame": {"layout": "auto"},
    "showValue": "never",
    "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": True},
    "yAxis": {"axisPlacement": "left", "reverse": False},
}  # fmt: skip
"""A heat map with a row for each series."""


@dataclass(frozen=True)
class Limit:
    """A line on a panel: from this value on the panel turns to this color."""

    value: float
    color: str


@dataclass(frozen=True)
class Link:
    """A link below a panel's title, or of a table's cell."""

    title: str
    url: str


def widths(labels: Collection[str]) -> Mapping[str, int]:
    """Those of a table's columns; where all are known, the last text takes what is left of the panel."""
    known = {label: COLUMN_WIDTHS[label] for label in labels if label in COLUMN_WIDTHS}
    texts = [label for label in known if label != "Value"]
    if len(known) == len(labels) and texts:
        del known[texts[-1]]
    return known


def axis_end(unit: str, limits: Sequence[Limit] = ()) -> float:
    """What an axis shows at least: the first limit with room above it, else little."""
    if limits and min(limit.value for limit in limits) > 0:
        return round(1.1 * min(limit.value for limit in limits), 6)
    return _AXIS_ENDS.get(unit, 1.0)


def by_name(name: str, properties: Mapping[str, Any]) -> Json:
    """An override of the series or column of this name."""
    return _override("byName", name, properties)


def colored(name: str, color: str) -> Json:
    """What gives the series of this name its color."""
    return by_name(name, {"color": {"mode": "fixed", "fixedColor": color}})


def alone(target: str) -> Json:
    """What draws the series of this target as a plain dashed line."""
    properties = {
        "custom.stacking": {"mode": "none", "group": "A"},
        "custom.fillOpacity": 0,
        "custom.lineStyle": {"fill": "dash", "dash": [10, 10]},
    }
    return _override("byFrameRefID", target, properties)


def mapping(states: States) -> Json:
    """Values as words in a color."""
    shown = enumerate(states.items())
    return {
        "type": "value",
        "options": {
            value if isinstance(value, str) else f"{value:g}": {"text": text, "color": color, "index": index}
            for index, (value, (text, color)) in shown
        },
    }


def _override(matcher: str, options: str, properties: Mapping[str, Any]) -> Json:
    return {
        "matcher": {"id": matcher, "options": options},
        "properties": [{"id": id, "value": value} for id, value in properties.items()],
    }
