"""What the step clock writes: a row and some sums for each finished step.

The time of steps that were only noted is known as a whole, besides the wait for data; it is charged to forward,
backward, optimizer and other in the proportions of the steps that were looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from gpuwatch.catalog import (
    BATCHES,
    BETWEEN_SECONDS,
    EPOCH_RESTART_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_START_SECONDS,
    EPOCH_STARTS,
    EVALUATION_FORWARDS,
    EVALUATION_SECONDS,
    PHASE_SECONDS,
    STEP_BOUNDS,
    STEP_SECONDS,
)
from gpuwatch.layout import Column, Phase, Tag
from gpuwatch.record import RecordWriter
from gpuwatch.window import WARM_UP_STEPS

_COUNTERS = (
    BATCHES,
    EVALUATION_SECONDS,
    EVALUATION_FORWARDS,
    BETWEEN_SECONDS,
    EPOCH_STARTS,
    EPOCH_START_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_RESTART_SECONDS,
)
# Plain ints: an enum's members cost a lookup each.
OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER, EPOCH_START, EVALUATION, PENDING, BETWEEN = (int(phase) for phase in Phase)
_NAMES = {DATA: "data", FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer", OTHER: "other"}
_SPLIT = (OTHER, FORWARD, BACKWARD, OPTIMIZER)
_NAN = float("nan")

LOOKED_STEPS = 40
"""Looked-at steps that are kept: few enough that a rank that becomes slow, or is slow no more, is noticed soon."""

UNEVEN_STEPS = 64
UNEVEN_SECONDS = 0.02


class Ledger:
    """Writes steps to the record, and keeps the phases' totals."""

    def __init__(self, record: RecordWriter) -> None:
        self.record = record
        self.totals = [0.0] * len(Phase)
        self.proportions = [0.0] * len(Phase)
        self.looked: deque[dict[str, float]] = deque(maxlen=LOOKED_STEPS)
        self._series: dict[int, int] = {}
        self._index = {metric.name: record.counter(metric.name) for metric in _COUNTERS}
        self._bucket_index = [
            record.counter(f"{STEP_SECONDS.name}_bucket", le=f"{bound:g}") for bound in STEP_BOUNDS
        ] + [record.counter(f"{STEP_SECONDS.name}_bucket", le="+Inf")]
        self._sum_index = record.counter(f"{STEP_SECONDS.name}_sum")

    def step(
        self,
        spent: list[int],
        now: int,
        number: int,
        *,
        fetched: bool,
        unseen: bool,
        gc_nanoseconds: int,
        elements: float,
    ) -> None:
        """Write a step that spent these nanoseconds by phase and ended ``now``.

        ``fetched`` tells whether its wait for data was seen, ``unseen`` that an optimizer step of it was only noted.
        """
        other, data, forward, backward, optimizer, epoch_start, evaluation, pending, between = spent
        evaluation += pending
        if unseen:  # one optimizer's part of the step was seen and another's was not: no part is the whole
            other += forward + backward + optimizer
            forward = backward = optimizer = 0
        total = other + data + forward + backward + optimizer
        looked = backward or forward
        tags = 0
        if epoch_start:
            tags = Tag.EPOCH_START.value
        if evaluation:
            tags |= Tag.EVALUATION.value
        if gc_nanoseconds:
            tags |= Tag.GC.value
        record = self.record
        record.step_row(
            now / 1e9,
            number,
            total / 1e9,
            data / 1e9 if fetched else _NAN,
            forward / 1e9 if forward else _NAN,
            backward / 1e9 if backward else _NAN,
            optimizer / 1e9 if looked and optimizer else _NAN,
            epoch_start / 1e9,
            gc_nanoseconds / 1e9,
            elements,
            tags,
        )
        values = record.values
        seconds = total / 1e9
        values[self._bucket_index[bisect_left(STEP_BOUNDS, seconds)]] += 1
        values[self._sum_index] += seconds
        self._charge(data, other, forward, backward, optimizer, looked=bool(looked))
        if forward and backward and not tags and number > WARM_UP_STEPS:
            parts = {"forward": forward, "backward": backward, "optimizer": optimizer, "other": other}
            if fetched:
                parts["data"] = data
            self.looked.append({phase: nanoseconds / 1e9 for phase, nanoseconds in parts.items()})
        if epoch_start:
            self.add(EPOCH_START_SECONDS.name, epoch_start / 1e9)
        self.aside(evaluation, between)

    def _charge(self, data: int, other: int, forward: int, backward: int, optimizer: int, looked: bool) -> None:
        """Add a step to the phases' totals; what was not told apart goes by the proportions of recent looks."""
        totals, proportions = self.totals, self.proportions
        if looked:
            for phase, nanoseconds in zip(_SPLIT, (other, forward, backward, optimizer), strict=True):
                totals[phase] += nanoseconds
                proportions[phase] = 0.75 * proportions[phase] + nanoseconds
        else:
            rest, whole = other + optimizer, sum(proportions)
            if whole:
                for phase in _SPLIT:
                    totals[phase] += rest * proportions[phase] / whole
            else:
                totals[OTHER] += rest
        totals[DATA] += data

    def aside(self, evaluation: int, between: int) -> None:
        """Nanoseconds of no step: of an evaluation, and of what lies between steps."""
        if evaluation:
            self.add(EVALUATION_SECONDS.name, evaluation / 1e9)
        if between:
            self.add(BETWEEN_SECONDS.name, between / 1e9)

    def epoch_started(self, wait: int, restart: bool) -> None:
        """The first batch of an epoch took ``wait`` nanoseconds; ``restart`` after the loader's first epoch."""
        self.add(EPOCH_STARTS.name, 1)
        if restart:
            self.add(EPOCH_RESTARTS.name, 1)
            self.add(EPOCH_RESTART_SECONDS.name, wait / 1e9)

    def add(self, name: str, amount: float) -> None:
        """Raise a counter."""
        self.record.values[self._index[name]] += amount

    def uneven(self) -> bool:
        """Whether some recent steps were so slow that it is worth noting what each of them worked on."""
        totals = sorted(row[Column.TOTAL] for row in self.record.recent_rows(UNEVEN_STEPS) if not row[Column.TAGS])
        if len(totals) < UNEVEN_STEPS // 4:
            return False
        median = totals[len(totals) // 2]
        return totals[-3] > max(1.5 * median, median + UNEVEN_SECONDS)

    def publish(self, batches: int, evaluations: int) -> None:
        """Write the counters that need not be written at every step."""
        record = self.record
        for phase, nanoseconds in enumerate(self.totals):
            if not nanoseconds:
                continue  # a phase that was never seen is not known
            index = self._series.get(phase)
            if index is None:
                index = self._series[phase] = record.counter(PHASE_SECONDS.name, phase=_NAMES[phase])
            record.values[index] = nanoseconds / 1e9
        record.values[self._index[BATCHES.name]] = batches
        record.values[self._index[EVALUATION_FORWARDS.name]] = evaluations
