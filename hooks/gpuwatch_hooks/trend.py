"""A steady rise told from a fill, a saw and a jump: readings at the same point of the step, judged by quarters."""

from __future__ import annotations

import itertools
from collections import deque

QUARTER = 3
"""Readings in a quarter of the window; the smallest of each is compared."""

SETTLE_STEPS = 16
EVERY_STEPS = 4
SHARE_OF_GROWTH = 0.1
"""Each quarter must bring at least this share of the whole: what has stopped to grow is no leak."""


class Trend:
    """A sliding window of readings. Two of them are at least :data:`EVERY_STEPS` steps apart."""

    def __init__(self) -> None:
        self.readings: deque[tuple[int, float]] = deque(maxlen=4 * QUARTER)

    def due(self, step: int) -> bool:
        """Whether it is time for another reading."""
        return step >= SETTLE_STEPS and (not self.readings or step - self.readings[-1][0] >= EVERY_STEPS)

    def add(self, step: int, reading: float) -> None:
        """Take a reading in."""
        self.readings.append((step, reading))

    def growth(self) -> tuple[float, int]:
        """How much it grew over how many steps; (0, 0) unless it grew in every quarter of a full window."""
        if len(self.readings) < 4 * QUARTER:
            return 0.0, 0
        readings = list(self.readings)
        floors = [min(number for _, number in readings[at : at + QUARTER]) for at in range(0, 4 * QUARTER, QUARTER)]
        grown = floors[-1] - floors[0]
        parts = [later - earlier for earlier, later in itertools.pairwise(floors)]
        if grown <= 0 or min(parts) < SHARE_OF_GROWTH * grown:
            return 0.0, 0
        return grown, readings[-QUARTER][0] - readings[0][0]
