"""From a record to what the rules read."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from gpuwatch.advisor import advise
from gpuwatch.catalog import (
    EPOCH_START_SECONDS,
    PHASE_SECONDS,
    RANK_ENDED,
    RANK_PROGRESS_AGE,
    RANK_UP,
    STEPS,
    WINDOW_JITTER_RATIO,
    WINDOW_SLOW_EXCESS_SECONDS,
    WINDOW_SLOW_RATIO,
    WINDOW_STEP_SECONDS,
    WINDOW_WAIT_SECONDS,
)
from gpuwatch.expr import Rate, series_key
from gpuwatch.history import (
    FEWEST_STEPS,
    WARM_UP_STEPS,
    history_of,
    phase_seconds,
    settled,
    slow_phase,
    slow_steps,
    window_gauges,
)
from gpuwatch.layout import VALUE_CAPACITY, Column, State, Tag
from gpuwatch.reader import read
from tests.recorded import NAN, USUAL_STEP, row, rows, write_run

DATA = PHASE_SECONDS.where(phase="data")
MEDIAN = series_key(WINDOW_STEP_SECONDS.name, {"quantile": "0.5"})


def test_warm_up_and_tagged_steps_are_left_out_of_the_window() -> None:
    ring = rows(100)
    ring[49] = row(50, 5.0, TAGS=Tag.EVALUATION, TOTAL=9.0)
    ring[59] = row(60, 6.0, TAGS=Tag.EPOCH_START | Tag.GC, TOTAL=9.0)
    ring[69] = row(70, 7.0, TAGS=Tag.GC)
    kept = [int(cells[Column.NUMBER]) for cells in settled(ring)]
    assert kept == [number for number in range(WARM_UP_STEPS + 1, 101) if number not in (50, 60)]


def test_too_few_steps_say_nothing_about_the_window() -> None:
    assert window_gauges(settled(rows(WARM_UP_STEPS + FEWEST_STEPS - 1))) == {}
    assert MEDIAN in window_gauges(settled(rows(WARM_UP_STEPS + FEWEST_STEPS)))


def test_the_window_has_the_quantiles_and_the_median_wait() -> None:
    ring = [row(number, number, TOTAL=float(number)) for number in range(11, 111)]
    gauges = window_gauges(ring)
    quantiles = {name: gauges[series_key(WINDOW_STEP_SECONDS.name, {"quantile": name})] for name in ("0.5", "0.95")}
    assert quantiles == {"0.5": 60.0, "0.95": 105.0}
    assert gauges[WINDOW_WAIT_SECONDS.name] == USUAL_STEP["data"]


def test_a_wait_that_was_never_seen_is_absent_and_not_zero() -> None:
    unwatched = {phase: spent for phase, spent in USUAL_STEP.items() if phase != "data"}
    gauges = window_gauges(settled(rows(100, unwatched)))
    assert WINDOW_WAIT_SECONDS.name not in gauges
    assert gauges[MEDIAN] == pytest.approx(0.07)


def test_slow_steps_are_outliers_and_the_phase_that_grows_is_named() -> None:
    ring = settled(rows(110))
    assert slow_steps(ring) == [] and slow_phase(ring) is None
    stuck = {**USUAL_STEP, "backward": 0.9}
    ring[::10] = [row(int(cells[Column.NUMBER]), cells[Column.END], stuck) for cells in ring[::10]]
    gauges = window_gauges(ring)
    assert gauges[WINDOW_SLOW_RATIO.name] == pytest.approx(0.1)
    assert gauges[WINDOW_SLOW_EXCESS_SECONDS.name] == pytest.approx(0.86)
    assert gauges[WINDOW_JITTER_RATIO.name] > 1.5
    assert slow_phase(ring) == "backward"


def test_a_phase_is_named_only_where_slow_steps_agree() -> None:
    """Ten slow steps of which one was looked at, and a hiccup of the machine hit just that one."""
    ring = settled(rows(110))
    for at in range(0, 100, 10):
        number, end = int(ring[at][Column.NUMBER]), ring[at][Column.END]
        ring[at] = row(number, end, TOTAL=0.9, FORWARD=NAN, BACKWARD=NAN, OPTIMIZER=NAN)
    ring[0] = row(int(ring[0][Column.NUMBER]), ring[0][Column.END], TOTAL=0.9)
    assert slow_phase(ring) == "compute"
    ring[10] = row(int(ring[10][Column.NUMBER]), ring[10][Column.END], TOTAL=0.9)
    assert slow_phase(ring) == "other"
    for at in range(20, 50, 10):
        ring[at] = row(int(ring[at][Column.NUMBER]), ring[at][Column.END], TOTAL=0.9, FORWARD=0.8)
    assert slow_phase(ring) == "forward"


def test_a_step_on_a_larger_batch_is_slow_for_a_reason() -> None:
    ring = settled(rows(110))
    ring[::10] = [row(int(cells[Column.NUMBER]), cells[Column.END], TOTAL=0.9, ELEMENTS=4096) for cells in ring[::10]]
    assert slow_steps(ring) == []


def test_other_is_what_the_phases_leave() -> None:
    assert phase_seconds(row(1, 1.0), "other") == pytest.approx(0.005)
    assert phase_seconds(row(1, 1.0, DATA=NAN), "other") == pytest.approx(0.035)
    assert phase_seconds(row(1, 1.0, DATA=NAN), "data") == 0.0


def test_the_rate_of_a_phase_is_that_of_the_recent_steps(tmp_path: Path) -> None:
    history = history_of(read(write_run(tmp_path).path))
    share = (Rate(DATA) / Rate(PHASE_SECONDS)).value(history)
    assert share == pytest.approx(0.30)


def test_counters_of_a_short_run_are_kept_from_the_rules_on_shares(tmp_path: Path) -> None:
    history = history_of(read(write_run(tmp_path, steps=30).path))
    assert not any(key.startswith(PHASE_SECONDS.name) for key in history)
    assert EPOCH_START_SECONDS.name in history


def test_the_header_gives_the_gauges_of_a_rank(tmp_path: Path) -> None:
    running = write_run(tmp_path, "running", state=None)
    history = history_of(running.snapshot())
    assert history[RANK_UP.name][-1][1] == 1 and history[RANK_ENDED.name][-1][1] == 0
    assert RANK_PROGRESS_AGE.name in history and history[STEPS.name][-1][1] == 200
    running.close(State.DETACHED)
    history = history_of(read(running.path))
    assert history[RANK_UP.name][-1][1] == 0 and history[RANK_ENDED.name][-1][1] == 1
    assert RANK_PROGRESS_AGE.name not in history, "the age of an ended run says nothing"


@pytest.mark.parametrize("absurd", [NAN, math.inf, -math.inf, 1e308, -1e308])
@pytest.mark.parametrize("column", Column)
def test_an_absurd_ring_neither_raises_nor_poisons_the_window(tmp_path: Path, absurd: float, column: Column) -> None:
    writer = write_run(tmp_path, observations=[("debug-anomaly", "train.py:3", "", absurd)])
    for number in range(201, 221):
        cells = list(row(number, number * 0.1))
        cells[column] = absurd
        writer.step_row(*cells)
    snapshot = read(writer.path)
    advise(snapshot)
    assert window_gauges(settled(snapshot.ring))[MEDIAN] == pytest.approx(0.1)


def test_a_record_full_of_chance_bits_is_judged_without_an_error(tmp_path: Path) -> None:
    chance = random.Random(5)
    for attempt in range(20):
        writer = write_run(tmp_path, f"chance-{attempt}", state=None)
        for index in range(VALUE_CAPACITY):
            writer.values[index] = chance.choice([NAN, math.inf, -1.0, 1e308, chance.uniform(-1e9, 1e9)])
        for _ in range(200):
            writer.step_row(*(chance.choice([NAN, math.inf, -1e308, chance.uniform(0, 300)]) for _ in Column))
        writer.close(State.CLEAN)
        advise(read(writer.path))
