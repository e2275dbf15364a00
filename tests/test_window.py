"""The gauges of the recent steps: from the bytes of a ring as from its rows, and as plainly defined."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as any_of

from gpuwatch import window
from gpuwatch.catalog import WINDOW_JITTER_RATIO, WINDOW_SLOW_EXCESS_SECONDS, WINDOW_SLOW_RATIO, WINDOW_WAIT_SECONDS
from gpuwatch.history import settled
from gpuwatch.layout import RING_ROWS, ROW, Column, Tag
from tests.recorded import NAN, row

Row = tuple[float, ...]


def found(steps: window.Steps) -> dict[object, float]:
    return {(metric.name, *labels): number for metric, labels, number in window.gauges(steps)}


def ring(rows: Sequence[Row]) -> bytes:
    """The bytes of a ring after all these rows were written one after the other."""
    block = bytearray(ROW.size * RING_ROWS)
    for number, cells in enumerate(rows):
        ROW.pack_into(block, number % RING_ROWS * ROW.size, *cells)
    return bytes(block)


seconds = any_of.floats(1e-4, 2.0)
steps: any_of.SearchStrategy[list[dict[str, float]]] = any_of.lists(
    any_of.builds(
        dict,
        total=seconds,
        wait=any_of.one_of(seconds, any_of.just(NAN)),
        gc=any_of.sampled_from([0.0, 0.0, 0.0, 0.05, NAN]),
        elements=any_of.sampled_from([1024.0, 1024.0, 1100.0, 4096.0, NAN]),
        tags=any_of.sampled_from([0, 0, 0, Tag.GC, Tag.EPOCH_START, Tag.EVALUATION | Tag.GC]),
    ),
    max_size=150,
)


def rows_of(drawn: Sequence[dict[str, float]]) -> list[Row]:
    return [
        row(number, float(number), {"data": each["wait"]}, TOTAL=each["total"], GC=each["gc"], TAGS=each["tags"],
            ELEMENTS=each["elements"])
        for number, each in enumerate(drawn, 1)
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(steps)
def test_the_bytes_of_a_ring_say_what_its_settled_rows_say(drawn: list[dict[str, float]]) -> None:
    rows = rows_of(drawn)
    assert found(window.steps_in(ring(rows), 0, len(rows))) == found(window.steps_of(settled(rows)))


def test_a_ring_that_wrapped_leaves_out_what_may_be_half_overwritten() -> None:
    rows = [row(number, float(number), {"data": float(number)}) for number in range(1, RING_ROWS + 501)]
    read = window.steps_in(ring(rows), 520, len(rows))
    assert read.totals == [float(number) for number in range(521, RING_ROWS + 501)]
    assert window.steps_in(ring(rows), len(rows), len(rows)).totals == []
    assert window.steps_in(ring(rows[:30])[: 3 * ROW.size + 5], 0, 3).totals == []  # numbers up to 10 are warm-up


@settings(max_examples=40, deadline=None)
@given(any_of.lists(seconds, min_size=window.FEWEST_STEPS, max_size=90), any_of.lists(seconds, max_size=5))
def test_the_gauges_are_what_statistics_says(usual: list[float], slow: list[float]) -> None:
    totals = usual + [10 * each for each in slow]
    said = found(window.Steps(totals, totals, [0.0] * len(totals), [NAN] * len(totals)))
    median = statistics.median(totals)
    assert said[WINDOW_WAIT_SECONDS.name,] == said["gpuwatch_window_step_seconds", "0.5"] or len(totals) % 2 == 0
    assert said[WINDOW_WAIT_SECONDS.name,] == pytest.approx(median)
    assert said[WINDOW_JITTER_RATIO.name,] == pytest.approx(statistics.fmean(totals) / median)
    spread = 1.4826 * statistics.median(abs(total - median) for total in totals)
    limit = max(median + 6 * spread, 1.5 * median, median + window.HICCUP_SECONDS)
    beyond = [total - median for total in totals if total > limit]
    assert said[WINDOW_SLOW_RATIO.name,] == len(beyond) / len(totals)
    if beyond:
        assert said[WINDOW_SLOW_EXCESS_SECONDS.name,] == pytest.approx(statistics.median(beyond))


@pytest.mark.parametrize("column", Column)
@pytest.mark.parametrize("number", [math.inf, -math.inf, NAN, 1e300, -1e300])
def test_numbers_that_no_run_has_give_finite_gauges(column: Column, number: float) -> None:
    rows = [list(row(place, float(place))) for place in range(1, 201)]
    for cells, strange in itertools.product(rows[50:150:7], (column,)):
        cells[strange] = number
    numbers = found(window.steps_in(ring([tuple(cells) for cells in rows]), 0, 200))
    assert all(map(math.isfinite, numbers.values()))
    assert numbers["gpuwatch_window_step_seconds", "0.5"] == pytest.approx(0.1)
