"""Measuring on a machine that others use too: how much of the cores they took meanwhile, and trying again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

QUIET_CORES = 0.15
"""What others may take of the cores without spoiling a measurement."""


def quietest(measure: Callable[[], Result], tries: int) -> tuple[Result, float]:
    """The result of the first try during which others left the cores alone, or of the quietest of all tries.

    With it the cores that others took meanwhile.
    """
    best = watched_by(measure)
    for _ in range(tries - 1):
        if best[1] <= QUIET_CORES:
            break
        best = min(best, watched_by(measure), key=lambda tried: tried[1])
    return best


def watched_by(measure: Callable[[], Result]) -> tuple[Result, float]:
    """A result, and the cores that other processes took meanwhile. ``measure`` has to wait for its children."""
    begun, busy, own = time.monotonic(), _busy_seconds(), _own_seconds()
    result = measure()
    others = _busy_seconds() - busy - (_own_seconds() - own)
    return result, max(0.0, others / (time.monotonic() - begun))


def _own_seconds() -> float:
    return sum(os.times()[:4])  # its children's too, once they have been waited for


def _busy_seconds() -> float:
    """Seconds that the cores this process may use were busy, or not there; 0 where no kernel tells."""
    try:
        with open("/proc/stat") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
    except OSError:
        return 0.0
    allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for name, *fields in lines:
        if name in allowed:
            user, nice, system, _idle, _waiting, interrupt, soft, stolen, *_ = map(int, fields)
            ticks += user + nice + system + interrupt + soft + stolen
    return ticks / os.sysconf("SC_CLK_TCK")
