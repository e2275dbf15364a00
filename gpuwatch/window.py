"""The recent steps of a run as columns of numbers, and the ``gpuwatch_window_*`` gauges of them.

Columns, not rows: the daemon works them out at every scrape, and 2,048 rows of eleven numbers are 20,000 objects.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from gpuwatch.catalog import (
    WINDOW_JITTER_RATIO,
    WINDOW_SLOW_EXCESS_SECONDS,
    WINDOW_SLOW_RATIO,
    WINDOW_STEP_SECONDS,
    WINDOW_WAIT_SECONDS,
)
from gpuwatch.expr import Metric
from gpuwatch.layout import RING_ROWS, ROW, Column, Tag

WARM_UP_STEPS = 10
"""Steps left out at the start of a run: compilation, worker start-up, caches."""

FEWEST_STEPS = 40
"""Untagged steps below which nothing is said about step times."""

HICCUP_SECONDS = 0.01
"""What a busy machine adds to a step now and then: counted as outliers, such steps would hide the slow ones."""

LARGER_BATCH = 1.2
"""A step on a batch this many times the median one is slow for a reason, and no outlier."""

LEFT_OUT = int(Tag.EPOCH_START | Tag.EVALUATION | Tag.COMPILE)
"""Tags of the steps that no median is taken of."""

ABSURD = 1e18
"""Seconds, steps or elements that no run has."""

QUANTILES = {"0.5": 0.50, "0.9": 0.90, "0.95": 0.95, "0.99": 0.99}

Gauge = tuple[Metric, tuple[str, ...], float]
"""A metric, the values of its own labels, a number."""


@dataclass(frozen=True)
class Steps:
    """What the gauges need of the settled steps, a list per column: seconds, and elements of a batch.

    NaN stands for what was not seen, in ``waits`` and ``sizes``.
    """

    totals: list[float]
    waits: list[float]
    collections: list[float]
    sizes: list[float]


def steps_of(rows: Sequence[tuple[float, ...]]) -> Steps:
    """The columns of rows that are settled already."""
    return Steps(
        [row[Column.TOTAL] for row in rows],
        [row[Column.DATA] for row in rows],
        [row[Column.GC] for row in rows],
        [row[Column.ELEMENTS] for row in rows],
    )


def steps_in(block: bytes, first: int, last: int) -> Steps:
    """The settled steps of a ring's bytes, where rows from ``first`` up to ``last``, as ever written, are whole."""
    first, last = max(0, first, last - RING_ROWS), min(last, first + RING_ROWS)
    cut = (first % RING_ROWS) * ROW.size
    turned = block[cut:] + block[:cut] if cut else block
    cells = memoryview(turned[: max(0, last - first) * ROW.size]).cast("d")

    def column(place: Column) -> list[float]:
        return [*cells[place :: len(Column)].tolist()]

    totals, waits, collections, sizes = map(column, (Column.TOTAL, Column.DATA, Column.GC, Column.ELEMENTS))
    tags, numbers = column(Column.TAGS), column(Column.NUMBER)
    # A record is somebody else's file. Sums tell at once when none of the numbers is absurd, or NaN.
    sound = all(-ABSURD < sum(each) < ABSURD for each in (totals, collections, tags, numbers))
    if sound and numbers and numbers[0] > WARM_UP_STEPS:
        kept = [not tag or not int(tag) & LEFT_OUT for tag in tags] if any(tags) else None
    else:
        kept = [
            WARM_UP_STEPS < number < ABSURD
            and abs(total) < ABSURD
            and abs(tag) < ABSURD
            and not int(tag) & LEFT_OUT
            and not abs(pause) >= ABSURD
            for number, total, tag, pause in zip(numbers, totals, tags, collections, strict=True)
        ]
    if kept is not None:
        totals, waits, collections, sizes = (list(compress(each, kept)) for each in (totals, waits, collections, sizes))
    return Steps(totals, waits, collections, sizes)


def gauges(steps: Steps) -> Iterator[Gauge]:
    """The ``gpuwatch_window_*`` gauges; none when there are too few steps."""
    count = len(steps.totals)
    if count < FEWEST_STEPS:
        return
    ordered = sorted(steps.totals)
    for name, share in QUANTILES.items():
        yield WINDOW_STEP_SECONDS, (name,), ordered[min(count - 1, math.ceil(share * count) - 1)]
    known = -ABSURD < sum(steps.waits) < ABSURD  # NaN is not either
    waits = sorted(steps.waits if known else [wait for wait in steps.waits if abs(wait) < ABSURD])
    if len(waits) >= FEWEST_STEPS:
        yield WINDOW_WAIT_SECONDS, (), middle(waits)
    median = middle(ordered)
    slow = slow_steps(steps, ordered)
    yield WINDOW_SLOW_RATIO, (), len(slow) / count
    if slow:
        yield WINDOW_SLOW_EXCESS_SECONDS, (), middle(sorted(steps.totals[place] - median for place in slow))
    if median > 0:
        yield WINDOW_JITTER_RATIO, (), sum(ordered) / (count * median)


def slow_steps(steps: Steps, ordered: list[float] | None = None) -> list[int]:
    """Places of the outliers: beyond the median plus six scaled median absolute deviations, 1.5 medians, and a hiccup.

    Mean and deviation would not do: among 15 planted outliers and one first step of 30 s, mean + 3 sigma finds one.
    ``ordered`` are the step times sorted, where they are at hand.
    """
    # Collections have a rule of their own: their time is taken off.
    spent = steps.totals
    if any(steps.collections):
        spent = [
            total - pause if pause == pause else total for total, pause in zip(spent, steps.collections, strict=True)
        ]
        ordered = None
    ordered = ordered or sorted(spent)
    median = middle(ordered)
    # Deviations of what is sorted fall and then rise, which is sorted in no time.
    spread = 1.4826 * middle(sorted([abs(number - median) for number in ordered]))
    limit = max(median + 6 * spread, 1.5 * median, median + HICCUP_SECONDS)
    if bisect_right(ordered, limit) == len(ordered):
        return []
    slow = [place for place, number in enumerate(spent) if number > limit]
    sizes = sorted([size for size in steps.sizes if size == size])
    large = LARGER_BATCH * middle(sizes) if sizes else math.nan
    if sizes and sizes[-1] > large:  # where sizes vary, a step of unknown size may be a large one
        return [place for place in slow if steps.sizes[place] <= large]
    return slow


def middle(ordered: Sequence[float]) -> float:
    """The median of numbers in order; there must be one at least."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
