"""From a record to the series of a rank that may be published: only what the catalog knows, as the catalog has it.

A record is written by somebody else's process and is not believed: names, labels and numbers are checked, text is
cut to what a label may hold, and the number of series is limited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuwatch import loadercosts, window
from gpuwatch.catalog import (
    LOADER_AFFORDABLE,
    LOADER_ALONE,
    LOADER_BEST_PREFETCH,
    LOADER_BEST_WAIT,
    LOADER_BEST_WORKERS,
    LOADER_NEEDED_CORES,
    METRICS,
    OBSERVATION,
    RANK_BUSY,
    RANK_ENDED,
    RANK_EXIT_INFO,
    RANK_GONE_TIME,
    RANK_INFO,
    RANK_LAST_STEP,
    RANK_POSITION,
    RANK_PROGRESS_AGE,
    RANK_START_TIME,
    RANK_STEP_AGE,
    RANK_UP,
    STEP_BOUNDS,
    STEP_SECONDS,
    STEPS,
    UNPUBLISHED,
    UNPUBLISHED_PARTS,
    WINDOW_JITTER_RATIO,
    WINDOW_SLOW_EXCESS_SECONDS,
    WINDOW_SLOW_RATIO,
    WINDOW_STEP_SECONDS,
    WINDOW_WAIT_SECONDS,
)
from gpuwatch.catalog.ruleids import RULE_IDS
from gpuwatch.expr import Metric, series_key
from gpuwatch.history import identity_gauges, settled
from gpuwatch.layout import MODULE_ROW, WORKER_ROW
from gpuwatch.lifecycle import exit_of
from gpuwatch.reader import Observation, Snapshot
from gpuwatch.standing import standing
from gpuwatch.window import Gauge

SERIES_LIMIT = 160
"""Series of one rank that are published, all together; a usual rank has 100 at most."""

OBSERVATIONS_FIRST = 24
"""Of these, as many findings at least, whatever else a record holds."""

TEXT_LIMIT = 200
"""Characters of a label value that are published."""

_BUCKET = f"{STEP_SECONDS.name}_bucket"
_SUM = f"{STEP_SECONDS.name}_sum"
_BOUNDS = {**{f"{bound:g}": str(bound) for bound in STEP_BOUNDS}, "+Inf": "+Inf"}
"""A bucket's bound as a record names it, and as Prometheus wants it."""

_SHARES = frozenset(f"{percent / 100:g}" for percent in range(101))
"""Quantiles that a record may name."""

_HEADLINE = (RANK_UP, RANK_ENDED, RANK_LAST_STEP)
_SIZED = (
    LOADER_BEST_WORKERS,
    LOADER_BEST_PREFETCH,
    LOADER_BEST_WAIT,
    LOADER_NEEDED_CORES,
    LOADER_AFFORDABLE,
    LOADER_ALONE,
)
_BY_THE_READER = frozenset(
    metric.name
    for metric in (
        *_HEADLINE,
        *_SIZED,
        STEPS,
        RANK_INFO,
        RANK_EXIT_INFO,
        RANK_START_TIME,
        RANK_STEP_AGE,
        RANK_PROGRESS_AGE,
        RANK_BUSY,
        RANK_POSITION,
        RANK_GONE_TIME,
        WINDOW_STEP_SECONDS,
        WINDOW_WAIT_SECONDS,
        WINDOW_SLOW_RATIO,
        WINDOW_SLOW_EXCESS_SECONDS,
        WINDOW_JITTER_RATIO,
    )
)
"""What the reader says itself, whatever the record says."""

Vetted = tuple[Metric | None, tuple[str, ...]]
"""A series of a record as it may be published: its metric, or None for one that may not, and its own labels."""

_REFUSED: Vetted = (None, ())


@dataclass(frozen=True)
class Histogram:
    """A step-time histogram as Prometheus has it: cumulative counts by upper bound, and the sum in seconds."""

    buckets: tuple[tuple[str, float], ...]
    seconds: float


@dataclass(frozen=True)
class RankSeries:
    """All that is published of one rank; ``dropped`` counts the series left out."""

    series: tuple[Gauge, ...]
    histogram: Histogram | None
    dropped: int

    def count(self) -> int:
        """How many series that is."""
        return len(self.series) + (0 if self.histogram is None else len(self.histogram.buckets) + 2)


def rank_series(snapshot: Snapshot) -> RankSeries:
    """Everything a record says that may be published."""
    steps = window.steps_of(settled(snapshot.ring))
    advice = loadercosts.gauges(snapshot.values, steps, snapshot.step, snapshot.run_seconds)
    series = dict.fromkeys((name, tuple(labels.items())) for name, labels in snapshot.series)
    return published(
        snapshot,
        [vetted(name, dict(labels)) for name, labels in series],
        [snapshot.values.get(series_key(name, dict(labels))) for name, labels in series],
        snapshot.observations,
        (*window.gauges(steps), *advice),
    )


def published(
    head: Snapshot,
    series: Sequence[Vetted | None],
    numbers: Sequence[float | None],
    observations: Sequence[Observation],
    gauges: Sequence[Gauge],
) -> RankSeries:
    """What is published of a record: of the header, of its series with their numbers, of what was worked out of it."""
    taken: list[Gauge] = []
    parts: dict[tuple[str, ...], float] = {}
    dropped = 0
    for seen, number in zip(series, numbers, strict=True):
        if seen is None or number is None:
            continue
        metric, own = seen
        if metric is None or (number < 0 and metric.kind == "counter"):
            dropped += 1
        elif metric is STEP_SECONDS:
            parts[own] = number
        else:
            taken.append((metric, own, number))
    histogram = _histogram(parts)
    always = [gauge for gauge in (*_identity(head), *gauges) if _wanted(gauge[0].name, gauge[1])]
    room = SERIES_LIMIT - len(always) - (len(_BOUNDS) + 2 if histogram is not None else 0)
    found = list(_observed(observations))
    listed = [*found[:OBSERVATIONS_FIRST], *taken, *found[OBSERVATIONS_FIRST:]]
    return RankSeries((*always, *listed[:room]), histogram, dropped + max(0, len(listed) - room))


def vetted(name: str, labels: Mapping[str, str]) -> Vetted | None:
    """How a series of a record may be published; None for one that is read otherwise."""
    if name == _BUCKET and set(labels) == {"le"}:
        return STEP_SECONDS, (labels["le"],)
    if name == _SUM and not labels:
        return STEP_SECONDS, ()
    if name in _BY_THE_READER or name in (_BUCKET, _SUM, MODULE_ROW, WORKER_ROW):
        return None
    metric = METRICS.get(name)
    if metric is None or metric.scope != "rank" or metric.kind not in ("counter", "gauge", "summary"):
        return _REFUSED
    if metric == OBSERVATION or set(labels) != set(metric.labels):
        return _REFUSED
    if metric.kind == "summary" and labels["quantile"] not in _SHARES:
        return _REFUSED
    own = tuple(clean(labels[label]) for label in metric.labels)
    return (metric, own) if _wanted(name, own) else None


def _wanted(name: str, own: tuple[str, ...]) -> bool:
    """Whether an alert or a panel reads it."""
    return name not in UNPUBLISHED and (name, *own) not in UNPUBLISHED_PARTS


def tombstone(snapshot: Snapshot) -> RankSeries:
    """What stays of a rank whose process is gone: that it is gone, how, and its last step."""
    gauges = identity_gauges(snapshot)
    headline = [(metric, (), gauges[metric.name]) for metric in (*_HEADLINE, RANK_GONE_TIME) if metric.name in gauges]
    far = standing(snapshot)
    if far is not None:
        headline.append((RANK_POSITION, (), far))
    return RankSeries((*headline, (RANK_EXIT_INFO, (exit_of(snapshot),), 1.0)), None, 0)


def clean(text: str) -> str:
    """Text as a label value: no control characters, no lone surrogates, not too long."""
    if len(text) <= TEXT_LIMIT and text.isprintable():
        return text
    kept = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[: TEXT_LIMIT + 1])
    return kept if len(kept) <= TEXT_LIMIT else kept[: TEXT_LIMIT - 1] + "…"


def _identity(snapshot: Snapshot) -> Iterator[Gauge]:
    for name, number in identity_gauges(snapshot).items():
        yield METRICS[name], (), number
    far = standing(snapshot)
    if far is not None:
        yield RANK_POSITION, (), far
    known = {"pid": snapshot.pid, **{key: text for key, text in snapshot.identity.items() if text is not None}}
    yield RANK_INFO, tuple(clean(str(known.get(label, ""))) for label in RANK_INFO.labels), 1.0
    if not snapshot.up:
        yield RANK_EXIT_INFO, (exit_of(snapshot),), 1.0


def _observed(observations: Sequence[Observation]) -> Iterator[Gauge]:
    for seen in observations:
        if seen.rule in RULE_IDS and math.isfinite(seen.magnitude):
            yield OBSERVATION, (seen.rule, clean(seen.where)), seen.magnitude


def _histogram(parts: Mapping[tuple[str, ...], float]) -> Histogram | None:
    """The step-time histogram; None unless every part of it is there and can be a count."""
    if len(parts) != len(_BOUNDS) + 1:
        return None  # other bounds: another version's
    buckets, total = [], 0.0
    for name, bound in _BOUNDS.items():
        count = parts.get((name,))
        if count is None or count < 0 or not count.is_integer():
            return None
        total += count
        buckets.append((bound, total))
    seconds = parts.get(())
    if seconds is None or seconds < 0 or not math.isfinite(seconds):
        return None
    return Histogram(tuple(buckets), seconds)
