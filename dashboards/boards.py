"""Every dashboard there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dashboards.data import data
from dashboards.fleet import fleet
from dashboards.hardware import hardware
from dashboards.memory import memory
from dashboards.ranks import ranks
from dashboards.training import training

BOARDS: Mapping[str, Callable[[], str]] = {
    "training": training,
    "memory": memory,
    "data": data,
    "ranks": ranks,
    "hardware": hardware,
    "fleet": fleet,
}
"""By the name of their file."""
