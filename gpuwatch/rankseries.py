"""From a record to the series of a rank that may be published: only what the catalog knows, as the catalog has it.

A record is written by somebody else's process and is not believed: names, labels and numbers are checked, text is
cut to what a label may hold, and the number of series is limited.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuwatch.catalog import (
    METRICS,
    OBSERVATION,
    RANK_ENDED,
    RANK_EXIT_INFO,
    RANK_INFO,
    RANK_LAST_STEP,
    RANK_PROGRESS_AGE,
    RANK_START_TIME,
    RANK_STEP_AGE,
    RANK_UP,
    STEP_BOUNDS,
    STEP_SECONDS,
    STEPS,
)
from gpuwatch.expr import Metric, series_key
from gpuwatch.history import identity_gauges, settled, window_gauges
from gpuwatch.layout import MODULE_ROW
from gpuwatch.reader import Snapshot
from gpuwatch.report.document import exit_of
from gpuwatch.rulebook import RULES_BY_ID

SERIES_LIMIT = 400
"""Series of one rank that are published; a usual rank has about 100."""

TEXT_LIMIT = 200
"""Characters of a label value that are published."""

_BUCKET = f"{STEP_SECONDS.name}_bucket"
_SUM = f"{STEP_SECONDS.name}_sum"
_BOUNDS = {**{f"{bound:g}": str(bound) for bound in STEP_BOUNDS}, "+Inf": "+Inf"}
"""A bucket's bound as a record names it, and as Prometheus wants it."""

_HEADLINE = (RANK_UP, RANK_ENDED, RANK_LAST_STEP)
_BY_THE_READER = frozenset(
    metric.name
    for metric in (*_HEADLINE, STEPS, RANK_INFO, RANK_EXIT_INFO, RANK_START_TIME, RANK_STEP_AGE, RANK_PROGRESS_AGE)
)
"""What the reader says itself, whatever the record says."""

Series = tuple[Metric, tuple[str, ...], float]
"""A metric, the values of its own labels, a number."""


@dataclass(frozen=True)
class Histogram:
    """A step-time histogram as Prometheus has it: cumulative counts by upper bound, and the sum in seconds."""

    buckets: tuple[tuple[str, float], ...]
    seconds: float


@dataclass(frozen=True)
class RankSeries:
    """All that is published of one rank; ``dropped`` counts the series left out."""

    series: tuple[Series, ...]
    histogram: Histogram | None
    dropped: int


def rank_series(snapshot: Snapshot) -> RankSeries:
    """Everything a record says that may be published."""
    histogram = _histogram(snapshot.values)
    taken: list[Series] = []
    dropped = 0
    for name, labels in dict.fromkeys((name, tuple(labels.items())) for name, labels in snapshot.series):
        if name in _BY_THE_READER or name in (_BUCKET, _SUM, MODULE_ROW):
            continue
        number = snapshot.values.get(series_key(name, dict(labels)))
        if number is None or not math.isfinite(number):
            continue
        metric = _published(name, dict(labels), number)
        if metric is None or len(taken) >= SERIES_LIMIT:
            dropped += 1
        else:
            taken.append((metric, tuple(clean(dict(labels)[label]) for label in metric.labels), number))
    seen = list(_observed(snapshot))
    fits = max(0, SERIES_LIMIT - len(taken))
    return RankSeries(
        series=(*_identity(snapshot), *_window(snapshot), *taken, *seen[:fits]),
        histogram=histogram,
        dropped=dropped + len(seen[fits:]),
    )


def tombstone(snapshot: Snapshot) -> RankSeries:
    """What stays of a rank whose process is gone: that it is gone, how, and its last step."""
    gauges = identity_gauges(snapshot)
    headline = [(metric, (), gauges[metric.name]) for metric in _HEADLINE]
    return RankSeries((*headline, (RANK_EXIT_INFO, (exit_of(snapshot),), 1.0)), None, 0)


def clean(text: str) -> str:
    """Text as a label value: no control characters, no lone surrogates, not too long."""
    kept = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[: TEXT_LIMIT + 1])
    return kept if len(kept) <= TEXT_LIMIT else kept[: TEXT_LIMIT - 1] + "…"


def _published(name: str, labels: Mapping[str, str], number: float) -> Metric | None:
    metric = METRICS.get(name)
    if metric is None or metric.scope != "rank" or metric.kind not in ("counter", "gauge") or metric == OBSERVATION:
        return None
    if set(labels) != set(metric.labels) or (metric.kind == "counter" and number < 0):
        return None
    return metric


def _identity(snapshot: Snapshot) -> Iterator[Series]:
    for name, number in identity_gauges(snapshot).items():
        yield METRICS[name], (), number
    known = {"pid": snapshot.pid, **{key: text for key, text in snapshot.identity.items() if text is not None}}
    yield RANK_INFO, tuple(clean(str(known.get(label, ""))) for label in RANK_INFO.labels), 1.0
    if not snapshot.up:
        yield RANK_EXIT_INFO, (exit_of(snapshot),), 1.0


def _window(snapshot: Snapshot) -> Iterator[Series]:
    for key, number in window_gauges(settled(snapshot.ring)).items():
        name, _, rest = key.partition("{")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        yield METRICS[name], tuple(labels[label] for label in METRICS[name].labels), number


def _observed(snapshot: Snapshot) -> Iterator[Series]:
    for seen in snapshot.observations:
        if seen.rule in RULES_BY_ID and math.isfinite(seen.magnitude):
            yield OBSERVATION, (seen.rule, clean(seen.where)), seen.magnitude


def _histogram(values: Mapping[str, float]) -> Histogram | None:
    """The step-time histogram; None unless every part of it is there and can be a count."""
    buckets, total = [], 0.0
    for name, bound in _BOUNDS.items():
        count = values.get(series_key(_BUCKET, {"le": name}))
        if count is None or count < 0 or not count.is_integer():
            return None
        total += count
        buckets.append((bound, total))
    seconds = values.get(_SUM)
    if seconds is None or seconds < 0 or not math.isfinite(seconds):
        return None
    return Histogram(tuple(buckets), seconds)
