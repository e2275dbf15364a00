"""The dashboards as Grafana reads them, and their parts, for tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dashboards import boards

Json = dict[str, Any]

BOARDS: list[Json] = [json.loads(draw()) for draw in boards.BOARDS.values()]
PANELS: list[Json] = [panel for board in BOARDS for panel in board["panels"] if panel["type"] != "row"]
TARGETS: list[tuple[str, Json]] = [
    (f"{board['uid'].removeprefix('gpuwatch-')}: {panel['title']}", target)
    for board in BOARDS
    for panel in board["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]
every_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
every_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
every_target = pytest.mark.parametrize(
    ("title", "target"), TARGETS, ids=[f"{title} {target['refId']}" for title, target in TARGETS]
)


def every(kind: str) -> pytest.MarkDecorator:
    """A test of each panel of this kind."""
    chosen = [panel for panel in PANELS if panel["type"] == kind]
    return pytest.mark.parametrize("panel", chosen, ids=lambda panel: panel["title"])
