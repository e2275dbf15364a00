"""From a few quantiles of a time, and its mean, to as many equally likely times.

Between two quantiles nothing is known but the mean of it all: that decides whether the curve that joins them rises
early or late. One batch in thirty that takes ten times as long shows in the mean, and in no quantile but the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

TIMES = 100
"""Equally likely times that a distribution is told by."""

BENDS = (1 / 20, 20.0)
"""Exponents of the curves that join two quantiles, from a jump at the lower one to a jump at the upper one."""


def spread(quantiles: Mapping[float, float], mean: float | None = None) -> tuple[float, ...]:
    """Sorted times, each as likely as the other; ``quantiles`` are seconds by share, one of them the median's (0.5).

    Without a mean they are joined by straight lines. Below the first quantile and above the last all is as they are.
    """
    points = [(0.0, 0.0), *sorted(quantiles.items())]
    points[0] = (0.0, points[1][1])
    for place, (share, seconds) in enumerate(points[1:], 1):
        points[place] = share, max(seconds, points[place - 1][1])  # a record is not believed to be in order
    points.append((1.0, points[-1][1]))
    bend = 1.0 if mean is None else _bend(points, mean)
    return tuple(_along(points, bend))


def cut(times: tuple[float, ...], mean: float) -> tuple[float, ...]:
    """The sorted times with the longest cut down to one level, so that this is their mean.

    A wait that has nothing to do with them (for a core) is in the longest: it is rare and long.
    """
    surplus = len(times) * ((sum(times) / len(times)) - mean)
    for longest in range(1, len(times) + 1):
        below = times[-longest - 1] if longest < len(times) else 0.0
        step = longest * (times[-longest] - below)  # what is gained by cutting them all down to the next one
        if surplus <= step:
            level = times[-longest] - max(0.0, surplus) / longest
            return (*times[:-longest], *[level] * longest)
        surplus -= step
    return (0.0,) * len(times)


def _bend(points: list[tuple[float, float]], mean: float) -> float:
    """The exponent g of the curves above the median with which all have this mean; u^g on [0, 1] has 1 / (g + 1)."""
    level = rise = 0.0
    for (low, least), (high, most) in itertools.pairwise(points):
        if low < 0.5:
            level += (high - low) * (least + most) / 2
        else:
            level += (high - low) * least
            rise += (high - low) * (most - least)
    if rise <= 0:
        return 1.0
    share = min(max((mean - level) / rise, 1e-3), 1.0)
    return min(max(1 / share - 1, BENDS[0]), BENDS[1])


def _along(points: list[tuple[float, float]], bend: float) -> Iterator[float]:
    place = 1
    for index in range(TIMES):
        share = (index + 0.5) / TIMES
        while points[place][0] <= share:
            place += 1
        (low, least), (high, most) = points[place - 1], points[place]
        risen = (share - low) / (high - low)
        yield least + (most - least) * (risen**bend if low >= 0.5 else risen)
