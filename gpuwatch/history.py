"""From a record to what the rules read: samples per series, with the recent window worked out of the ring.

The window leaves out warm-up and tagged steps and abstains (no series at all) before there are enough of them. The
counters of the step clock get a second, older sample, taken back by what the ring's steps add up to, so that a rate
over the history is the rate of those steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from gpuwatch.catalog import (
    EPOCH_START_SECONDS,
    GC_PAUSE_SECONDS,
    OBSERVATION,
    PHASE_SECONDS,
    PHASES,
    RANK_ENDED,
    RANK_LAST_STEP,
    RANK_PROGRESS_AGE,
    RANK_START_TIME,
    RANK_STEP_AGE,
    RANK_UP,
    STEPS,
    WINDOW_JITTER_RATIO,
    WINDOW_SLOW_EXCESS_SECONDS,
    WINDOW_SLOW_RATIO,
    WINDOW_STEP_SECONDS,
    WINDOW_WAIT_SECONDS,
)
from gpuwatch.expr import History, Samples, series_key
from gpuwatch.layout import Column, State, Tag
from gpuwatch.reader import Snapshot

WARM_UP_STEPS = 10
"""Steps left out at the start of a run: compilation, worker start-up, caches."""

FEWEST_STEPS = 40
"""Untagged steps below which nothing is said about step times."""

HICCUP_SECONDS = 0.01
"""What a busy machine adds to a step now and then: counted as outliers, such steps would hide the slow ones."""

LARGER_BATCH = 1.2
"""A step on a batch this many times the median one is slow for a reason, and no outlier."""

_ABSURD = 1e18  # seconds, steps or elements that no run has
_QUANTILES = {"0.5": 0.50, "0.9": 0.90, "0.95": 0.95, "0.99": 0.99}
_PHASE_COLUMNS = {
    "data": Column.DATA,
    "forward": Column.FORWARD,
    "backward": Column.BACKWARD,
    "optimizer": Column.OPTIMIZER,
}

Row = tuple[float, ...]


def history_of(snapshot: Snapshot) -> History:
    """Everything the rules can read of one rank, as samples at most two deep."""
    now = snapshot.run_seconds
    history: dict[str, Samples] = {}
    for key, number in snapshot.values.items():
        history[key] = [(now, number)]
    for key, number in identity_gauges(snapshot).items():
        history[key] = [(now, number)]
    for observation in snapshot.observations:
        history[observation_key(observation.rule, observation.where)] = [(now, observation.magnitude)]
    rows = settled(snapshot.ring)
    history.update({key: [(now, number)] for key, number in window_gauges(rows).items()})
    if len(rows) >= FEWEST_STEPS:
        history.update(_taken_back(rows, history, now))
    elif snapshot.step < FEWEST_STEPS:
        # Too few steps to speak of shares: without the counters the rules on them abstain.
        history = {key: samples for key, samples in history.items() if not key.startswith(PHASE_SECONDS.name)}
    return history


def observation_key(rule: str, where: str) -> str:
    """Series key of an observation."""
    return series_key(OBSERVATION.name, {"rule": rule, "where": where})


def identity_gauges(snapshot: Snapshot) -> dict[str, float]:
    """What the header of a record says, under the catalog's names."""
    gauges = {
        RANK_UP.name: float(snapshot.up),
        RANK_ENDED.name: float(snapshot.state >= State.CLEAN),
        RANK_LAST_STEP.name: float(snapshot.step),
        RANK_START_TIME.name: snapshot.created,
        STEPS.name: float(snapshot.step),
    }
    if snapshot.up:
        gauges[RANK_PROGRESS_AGE.name] = snapshot.progress_age
        if snapshot.step_age is not None:
            gauges[RANK_STEP_AGE.name] = snapshot.step_age
    return gauges


def settled(ring: Sequence[Row]) -> list[Row]:
    """The steps of a ring that medians may be taken of: after warm-up, not tagged."""
    left_out = Tag.EPOCH_START | Tag.EVALUATION | Tag.COMPILE
    return [
        row
        for row in ring
        if row[Column.NUMBER] > WARM_UP_STEPS and _sound(row) and not int(row[Column.TAGS]) & left_out
    ]


def _sound(row: Row) -> bool:
    """Whether the numbers can be reckoned with: a record is somebody else's file."""
    if sum(map(abs, row)) < _ABSURD:  # the usual case, and the fast one
        return True
    known = all(not math.isnan(row[column]) for column in (Column.END, Column.TOTAL, Column.TAGS))
    return known and not any(abs(cell) >= _ABSURD for cell in row)


def window_gauges(rows: Sequence[Row]) -> dict[str, float]:
    """The ``gpuwatch_window_*`` gauges of these steps; empty when there are too few."""
    if len(rows) < FEWEST_STEPS:
        return {}
    totals = [row[Column.TOTAL] for row in rows]
    gauges = {
        series_key(WINDOW_STEP_SECONDS.name, {"quantile": name}): _quantile(totals, share)
        for name, share in _QUANTILES.items()
    }
    waits = [row[Column.DATA] for row in rows if not math.isnan(row[Column.DATA])]
    if len(waits) >= FEWEST_STEPS:
        gauges[WINDOW_WAIT_SECONDS.name] = statistics.median(waits)
    median = statistics.median(totals)
    slow = slow_steps(rows)
    gauges[WINDOW_SLOW_RATIO.name] = len(slow) / len(rows)
    if slow:
        gauges[WINDOW_SLOW_EXCESS_SECONDS.name] = statistics.median(row[Column.TOTAL] - median for row in slow)
    if median > 0:
        gauges[WINDOW_JITTER_RATIO.name] = statistics.fmean(totals) / median
    return gauges


def slow_steps(rows: Sequence[Row]) -> list[Row]:
    """The outliers: beyond the median plus six scaled median absolute deviations, 1.5 medians, and a hiccup.

    Mean and deviation would not do: among 15 planted outliers and one first step of 30 s, mean + 3 sigma finds one.
    """
    # Collections have a rule of their own: their time is taken off.
    totals = [row[Column.TOTAL] - row[Column.GC] for row in rows]
    median = statistics.median(totals)
    spread = 1.4826 * statistics.median(abs(total - median) for total in totals)
    limit = max(median + 6 * spread, 1.5 * median, median + HICCUP_SECONDS)
    slow = [row for row, total in zip(rows, totals, strict=True) if total > limit]
    if not slow:
        return []
    sizes = [row[Column.ELEMENTS] for row in rows if not math.isnan(row[Column.ELEMENTS])]
    large = LARGER_BATCH * statistics.median(sizes) if sizes else math.nan
    if any(size > large for size in sizes):  # where sizes vary, a step of unknown size may be a large one
        return [row for row in slow if row[Column.ELEMENTS] <= large]
    return slow


def slow_phase(rows: Sequence[Row]) -> str | None:
    """The phase that grows most in the slow steps, or None when there are none."""
    slow = slow_steps(rows)
    if not slow:
        return None
    # Among the outliers are the machine's own hiccups: those far shorter than the usual outlier say nothing.
    median = statistics.median(row[Column.TOTAL] for row in rows)
    least = statistics.median(row[Column.TOTAL] - median for row in slow) / 2
    slow = [row for row in slow if row[Column.TOTAL] - median >= least]
    looked = [row for row in slow if is_split(row)]
    if looked:
        usual = [row for row in rows if is_split(row)]
        growth = {phase: _median_of(looked, phase) - _median_of(usual, phase) for phase in PHASES}
        return max(growth, key=lambda phase: growth[phase])
    # None of them was looked at closely: only the wait can be told from the rest.
    wait = _median_of(slow, "data") - _median_of(rows, "data")
    excess = statistics.median(row[Column.TOTAL] for row in slow) - median
    return "data" if wait > excess / 2 else "compute"


def is_split(row: Row) -> bool:
    """Whether this step was looked at: its forward or backward is known."""
    return not (math.isnan(row[Column.FORWARD]) and math.isnan(row[Column.BACKWARD]))


def phase_seconds(row: Row, phase: str) -> float:
    """Seconds of a step in a phase; 0 where the phase was not seen, and all but the wait is other."""
    if phase == "other":
        return row[Column.TOTAL] - sum(phase_seconds(row, named) for named in _PHASE_COLUMNS)
    seconds = row[_PHASE_COLUMNS[phase]]
    return 0.0 if math.isnan(seconds) else seconds


def phase_sums(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds by phase over these steps; steps that were not looked at go by the proportions of those that were."""
    looked = [row for row in rows if is_split(row)]
    sums = {phase: math.fsum(phase_seconds(row, phase) for row in looked) for phase in PHASES}
    split = math.fsum(sums.values()) - sums["data"]
    noted = [row for row in rows if not is_split(row)]
    rest = math.fsum(row[Column.TOTAL] - phase_seconds(row, "data") for row in noted)
    if split > 0:
        sums = {phase: seconds + rest * seconds / split for phase, seconds in sums.items()}
    else:
        sums["other"] += rest
    sums["data"] = math.fsum(phase_seconds(row, "data") for row in rows)
    return sums


def _median_of(rows: Sequence[Row], phase: str) -> float:
    return statistics.median(phase_seconds(row, phase) for row in rows)


def _taken_back(rows: Sequence[Row], history: Mapping[str, Samples], now: float) -> dict[str, Samples]:
    """The step clock's counters with an older sample: the last one less what these rows add up to."""
    spans = {series_key(PHASE_SECONDS.name, {"phase": phase}): seconds for phase, seconds in phase_sums(rows).items()}
    spans[GC_PAUSE_SECONDS.name] = math.fsum(row[Column.GC] for row in rows)
    spans[EPOCH_START_SECONDS.name] = math.fsum(row[Column.EPOCH_START] for row in rows)
    length = max(rows[-1][Column.END] - rows[0][Column.END] + rows[0][Column.TOTAL], 1e-9)
    return {
        key: [(now - length, history[key][-1][1] - grown), history[key][-1]]
        for key, grown in spans.items()
        if key in history
    }


def _quantile(numbers: Sequence[float], share: float) -> float:
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
