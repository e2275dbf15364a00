"""From a record to what the rules read: samples per series, with the recent window worked out of the ring.

The window leaves out warm-up and tagged steps and abstains (no series at all) before there are enough of them. The
counters of the step clock get a second, older sample, taken back by what the ring's steps add up to, so that a rate
over the history is the rate of those steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from gpuwatch import loadercosts, means, window
from gpuwatch.catalog import (
    EPOCH_START_SECONDS,
    GC_PAUSE_SECONDS,
    OBSERVATION,
    PHASE_SECONDS,
    PHASES,
    RANK_ENDED,
    RANK_GONE_TIME,
    RANK_LAST_STEP,
    RANK_POSITION,
    RANK_PROGRESS_AGE,
    RANK_START_TIME,
    RANK_STEP_AGE,
    RANK_UP,
    STEPS,
)
from gpuwatch.expr import History, Samples, series_key
from gpuwatch.layout import Column, State
from gpuwatch.limits import AGREEING_STEPS
from gpuwatch.reader import Snapshot
from gpuwatch.standing import standing
from gpuwatch.window import ABSURD, LEFT_OUT
from gpuwatch.window import FEWEST_STEPS as FEWEST_STEPS
from gpuwatch.window import WARM_UP_STEPS as WARM_UP_STEPS

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
    far = standing(snapshot)
    if far is not None:
        history[RANK_POSITION.name] = [(now, far)]
    for observation in snapshot.observations:
        history[observation_key(observation.rule, observation.where)] = [(now, observation.magnitude)]
    rows = settled(snapshot.ring)
    history.update({key: [(now, number)] for key, number in window_gauges(rows).items()})
    for metric, _, number in loadercosts.gauges(snapshot.values, window.steps_of(rows), snapshot.step, now):
        history[metric.name] = [(now, number)]
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
    elif snapshot.state < State.CLEAN:
        seen = snapshot.created + snapshot.run_seconds
        gauges[RANK_GONE_TIME.name] = seen if snapshot.death is None else snapshot.death.at
    return gauges


def settled(ring: Sequence[Row]) -> list[Row]:
    """The steps of a ring that medians may be taken of: after warm-up, not tagged."""
    return [
        row
        for row in ring
        if row[Column.NUMBER] > WARM_UP_STEPS and _sound(row) and not int(row[Column.TAGS]) & LEFT_OUT
    ]


def _sound(row: Row) -> bool:
    """Whether the numbers can be reckoned with: a record is somebody else's file."""
    if sum(map(abs, row)) < ABSURD:  # the usual case, and the fast one
        return True
    known = all(not math.isnan(row[column]) for column in (Column.END, Column.TOTAL, Column.TAGS))
    return known and not any(abs(cell) >= ABSURD for cell in row)


def window_gauges(rows: Sequence[Row]) -> dict[str, float]:
    """The ``gpuwatch_window_*`` gauges of these steps; empty when there are too few."""
    return {
        series_key(metric.name, dict(zip(metric.labels, labels, strict=True))): number
        for metric, labels, number in window.gauges(window.steps_of(rows))
    }


def slow_steps(rows: Sequence[Row]) -> list[Row]:
    """The rows that are outliers (see :func:`gpuwatch.window.slow_steps`)."""
    return [rows[place] for place in window.slow_steps(window.steps_of(rows))]


def slow_phase(rows: Sequence[Row]) -> str | None:
    """The phase that grows most in the slow steps, or None when there are none."""
    slow = slow_steps(rows) if len(rows) >= FEWEST_STEPS else []
    if not slow:
        return None
    # Among the outliers are the machine's own hiccups: those far shorter than the usual outlier say nothing.
    median = means.median(row[Column.TOTAL] for row in rows)
    least = means.median(row[Column.TOTAL] - median for row in slow) / 2
    slow = [row for row in slow if row[Column.TOTAL] - median >= least]
    # The wait is known of every step: it alone can be told from the rest where few of them were looked at.
    wait = _median_of(slow, "data") - _median_of(rows, "data")
    excess = means.median(row[Column.TOTAL] for row in slow) - median
    return _grown_most(rows, slow) or ("data" if wait > excess / 2 else "compute")


def _grown_most(rows: Sequence[Row], slow: Sequence[Row]) -> str | None:
    """The phase that grew most in most of the slow steps that were looked at; None where too few were."""
    usual = [row for row in rows if is_split(row)]
    medians = {phase: _median_of(usual, phase) for phase in PHASES} if usual else {}
    votes = Counter(
        max(PHASES, key=lambda phase: phase_seconds(row, phase) - medians[phase]) for row in slow if is_split(row)
    )
    for phase, count in votes.most_common(1):
        if count >= AGREEING_STEPS and count > votes.total() / 2:
            return phase
    return None


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
    return means.median(phase_seconds(row, phase) for row in rows)


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
