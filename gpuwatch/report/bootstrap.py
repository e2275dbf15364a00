"""How sure a median is, and the ratio of two: the moving-block bootstrap.

Steps that follow each other are alike (a slow stretch of the machine, a long batch's neighbours), so single steps
drawn at random would promise more than is known. Runs of consecutive steps are drawn instead (Künsch 1989), as many as
make up a sample of the same length. Draws begin at a fixed seed: the same records give the same answer.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 400
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number with the interval it lies in, at :data:`CONFIDENCE`."""

    value: float
    low: float
    high: float


def median_ratio(before: Sequence[float], after: Sequence[float]) -> Estimate | None:
    """Median of ``after`` over median of ``before``; both in time order. None without a positive median to go by."""
    if not before or not after or statistics.median(before) <= 0:
        return None
    draw = random.Random(0)
    ratios = [
        median_after / median_before
        for _ in range(DRAWS)
        if (median_before := _drawn_median(before, draw)) > 0 and (median_after := _drawn_median(after, draw)) >= 0
    ]
    return _estimate(statistics.median(after) / statistics.median(before), ratios)


def median(numbers: Sequence[float]) -> Estimate | None:
    """The median of numbers in time order; None when there are none."""
    if not numbers:
        return None
    draw = random.Random(0)
    return _estimate(statistics.median(numbers), [_drawn_median(numbers, draw) for _ in range(DRAWS)])


def _drawn_median(numbers: Sequence[float], draw: random.Random) -> float:
    # A block as long as the cube root of the sample: the usual order of the length that a variance asks for.
    length = max(1, round(len(numbers) ** (1 / 3)))
    starts = len(numbers) - length + 1
    sample: list[float] = []
    for _ in range(math.ceil(len(numbers) / length)):
        start = int(draw.random() * starts)
        sample += numbers[start : start + length]
    return statistics.median(sample)


def _estimate(value: float, draws: list[float]) -> Estimate:
    draws.sort()
    outside = (1 - CONFIDENCE) / 2
    low = draws[math.floor(outside * (len(draws) - 1))]
    high = draws[math.ceil((1 - outside) * (len(draws) - 1))]
    return Estimate(value, min(low, value), max(high, value))
