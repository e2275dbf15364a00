"""What Prometheus scrapes: flight records and GPUs as series, worked out anew at every scrape.

The life of a rank: while it lives, everything; once it is gone, its final values until they were scraped once, and
then a tombstone for an hour. No series is published twice, and one source that fails does not lose the other.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gpuwatch.catalog import (
    BUILD_INFO,
    METRICS,
    RECORDS,
    RECORDS_REJECTED,
    SCOPES,
    SERIES_DROPPED,
    SOURCE_SECONDS,
    SOURCE_TIME,
    SOURCE_UP,
    STEP_SECONDS,
)
from gpuwatch.expr import Metric as Entry
from gpuwatch.lifecycle import Shelf, last_seen, newest
from gpuwatch.rankseries import Histogram, RankSeries, clean, rank_series, tombstone
from gpuwatch.reader import RecordError, Snapshot, read
from gpuwatch.sampler import Sampler, gpu_labels, gpu_series
from gpuwatch.version import __version__

TOMBSTONE_SECONDS = 3600.0
"""How long a rank is still mentioned after its end."""

_REASONS = (
    (" is not a regular file", "type"),
    (" has layout version", "version"),
    (" has ", "size"),
    (" does not begin", "magic"),
    (" holds no valid schema", "schema"),
    (": Too many levels of symbolic links", "type"),
)
"""How the reader's reasons begin, after the file's name."""

_UNREADABLE = "unreadable"


class Exporter(Collector):
    """A collector for a registry of prometheus_client; safe to be scraped by several threads at once."""

    def __init__(self, directory: Path, sampler: Sampler) -> None:
        self._shelf = Shelf(directory)
        self._sampler = sampler
        self._lock = threading.Lock()
        self._buried: set[Path] = set()
        self._records_read_at: float | None = None

    def collect(self) -> Iterator[Metric]:
        """Everything there is to say now."""
        table = _Table()
        with self._lock:
            self._add_records(table)
        self._add_gpus(table)
        table.put(BUILD_INFO, (), (__version__,), 1.0)
        yield from table.families()

    def _add_records(self, table: _Table) -> None:
        began = time.monotonic()
        try:
            snapshots, rejected = self._shelf.look()
        except OSError:
            _add_health(table, "records", False, time.monotonic() - began, self._records_read_at)
            return
        dropped = 0
        for snapshot in newest(snapshots):
            published = self._rank(snapshot)
            if published is not None:
                table.put_rank(clean(snapshot.run), clean(str(snapshot.rank)), published)
                dropped += published.dropped
        self._buried = {snapshot.path for snapshot in snapshots if not snapshot.up}
        table.put(RECORDS, (), (), len(snapshots))
        table.put(SERIES_DROPPED, (), (), dropped)
        for reason, count in Counter(_reason(name, text) for name, text in rejected).items():
            table.put(RECORDS_REJECTED, (), (reason,), count)
        self._records_read_at = time.time()
        _add_health(table, "records", True, time.monotonic() - began, self._records_read_at)

    def _rank(self, snapshot: Snapshot) -> RankSeries | None:
        """What to publish of a rank now, according to its life; None for one that ended long ago."""
        if snapshot.up:
            return rank_series(snapshot)
        if time.time() - last_seen(snapshot) > TOMBSTONE_SECONDS:
            return None
        if snapshot.path not in self._buried:
            with contextlib.suppress(OSError, RecordError):  # removed meanwhile
                return rank_series(read(snapshot.path))
        return tombstone(snapshot)

    def _add_gpus(self, table: _Table) -> None:
        sample, last = self._sampler.latest(), self._sampler.last_collected()
        if sample is not None:
            for reading in sample.readings:
                for metric, labels, number in gpu_series(reading):
                    table.put(metric, gpu_labels(reading), tuple(map(clean, labels)), number)
        _add_health(
            table,
            "nvml",
            sample is not None,
            None if last is None else last.seconds,
            None if last is None else last.taken_at,
        )


class _Table:
    """Series by metric; a series that is put again replaces the first, so that none is published twice."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        self._histograms: dict[tuple[str, ...], Histogram] = {}

    def put(self, metric: Entry, owner: tuple[str, ...], own: tuple[str, ...], number: float) -> None:
        if math.isfinite(number):
            self._numbers[metric.name][owner + own] = float(number)

    def put_rank(self, run: str, rank: str, published: RankSeries) -> None:
        for metric, own, number in published.series:
            self.put(metric, (run, rank), own, number)
        if published.histogram is not None:
            self._histograms[run, rank] = published.histogram

    def families(self) -> Iterator[Metric]:
        """Everything that was put, in the catalog's order."""
        for metric in METRICS.values():
            if metric.name in self._numbers:
                yield _family(metric, self._numbers[metric.name])
            elif metric is STEP_SECONDS and self._histograms:
                family = HistogramMetricFamily(metric.name, metric.help, labels=SCOPES[metric.scope])
                for owner, histogram in self._histograms.items():
                    family.add_metric(owner, histogram.buckets, histogram.seconds)
                yield family


def _family(metric: Entry, numbers: dict[tuple[str, ...], float]) -> Metric:
    names = (*SCOPES[metric.scope], *metric.labels)
    if metric.kind == "info":
        family = InfoMetricFamily(metric.name.removesuffix("_info"), metric.help, labels=SCOPES[metric.scope])
        for labels in numbers:
            family.add_metric(labels[: len(SCOPES[metric.scope])], dict(zip(names, labels, strict=True)))
        return family
    if metric.kind == "summary":  # quantiles alone, no count and no sum
        summary = Metric(metric.name, metric.help, "summary")
        for labels, number in numbers.items():
            summary.add_sample(metric.name, dict(zip(names, labels, strict=True)), number)
        return summary
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    plain: CounterMetricFamily | GaugeMetricFamily = kind(metric.name, metric.help, labels=names)
    for labels, number in numbers.items():
        plain.add_metric(labels, number)
    return plain


def _add_health(table: _Table, source: str, up: bool, seconds: float | None, collected_at: float | None) -> None:
    table.put(SOURCE_UP, (), (source,), up)
    if seconds is not None:
        table.put(SOURCE_SECONDS, (), (source,), seconds)
    if collected_at is not None:
        table.put(SOURCE_TIME, (), (source,), collected_at)


def _reason(name: str, text: str) -> str:
    said = text.removeprefix(name)
    return next((reason for beginning, reason in _REASONS if said.startswith(beginning)), _UNREADABLE)
