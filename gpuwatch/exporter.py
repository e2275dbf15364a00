"""What Prometheus scrapes: flight records and GPUs as series, as they are at every scrape.

The life of a rank: while it lives, everything; once it is gone, its final values until they were scraped once, and
then a tombstone for an hour. No series is published twice, and one source that fails does not lose the other.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from gpuwatch.busyness import Busyness
from gpuwatch.catalog import (
    BUILD_INFO,
    DIRECTORY_BYTES,
    DIRECTORY_FILES,
    DIRECTORY_FREE,
    RANK_BUSY,
    RANK_GONE_TIME,
    RECORDS,
    RECORDS_REJECTED,
    SERIES_DROPPED,
    SOURCE_SECONDS,
    SOURCE_TIME,
    SOURCE_UP,
    STEP_SECONDS,
)
from gpuwatch.exposition import Table
from gpuwatch.follower import Follower, Lines, Look
from gpuwatch.gpuseries import gpu_labels, gpu_series
from gpuwatch.inventory import Entry, Inventory, Leases, take_inventory
from gpuwatch.lifecycle import Claims, last_seen, newest
from gpuwatch.rankseries import RankSeries, Vetted, clean, published, rank_series, tombstone, vetted
from gpuwatch.reader import RecordError, Snapshot, read
from gpuwatch.sampler import Sampler
from gpuwatch.version import __version__

BURIAL_SECONDS = 5.0
"""Within this time the daemon writes down when a rank died; until then its last sign of life is no answer."""

TOMBSTONE_SECONDS = 3600.0
"""How long a rank is still mentioned after its end."""

RANKS_PER_USER = 128
"""Ranks of one user that are published: the living ones first, then the latest."""

SERIES_OF_ALL = 24_000
"""Series of all ranks together: one user's share is less. The scrape jobs of ours take 25,000, with the GPUs'; beyond
that Prometheus would take nothing at all of this node."""

WORK_SECONDS = 0.002
"""CPU time of a scrape after which no more gauges of recent steps are worked out: those left keep what they had, and
come first next time. Eight ranks that all made new steps take about 8 ms."""

WORK_SHARE = 0.25
"""Of the ranks, how many are worked out whatever that takes: none is older than four scrapes."""

REFUSED_SECONDS = 10.0
"""A file that is no record is not looked at again for so long, unless it is written anew."""

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
_LIMIT = "limit"


@dataclass
class _Ended:
    """A rank whose process is gone. Its record changes no more; ``gone`` is monotonic, whatever the clock does."""

    head: Snapshot
    gone: float
    found: float  # when this daemon saw it, monotonic
    final: bool = True  # not scraped since its end
    told: bool = False  # the head says how it ended


def _unless_open(rank: RankSeries, ended: _Ended) -> RankSeries:
    """The series without the time of death while that may still be written down: which rank was first hangs on it."""
    if ended.told:
        return rank
    return replace(rank, series=tuple(gauge for gauge in rank.series if gauge[0] is not RANK_GONE_TIME))


class Exporter:
    """Series of one directory of records and of the node's GPUs; safe to be scraped by several threads at once."""

    def __init__(self, directory: Path, sampler: Sampler) -> None:
        self._directory = directory
        self._sampler = sampler
        self._lock = threading.Lock()
        self._leases = Leases()
        self._prefixes: dict[tuple[object, ...], str] = {}
        self._lines = Lines(vetted)
        self._followed: dict[Path, Follower[Vetted | None]] = {}
        self._looks: dict[Path, Look[Vetted | None]] = {}
        self._ended: dict[Path, _Ended] = {}
        self._refused: dict[Path, tuple[tuple[int, int, int], float, str]] = {}
        self._claims = Claims()
        self._busyness = Busyness()
        self._records_read_at: float | None = None

    def text(self, openmetrics: bool = False) -> str:
        """Everything there is to say now, as Prometheus reads it."""
        with self._lock:
            table = Table(self._prefixes)
            self._add_records(table)
            self._add_gpus(table)
            table.put(BUILD_INFO, (), (__version__,), 1.0)
            return table.text(openmetrics)

    # -- records -----------------------------------------------------------------------------------------------------

    def _add_records(self, table: Table) -> None:
        began = time.monotonic()
        try:
            inventory = take_inventory(self._directory, self._leases)
        except OSError:
            _add_health(table, "records", False, time.monotonic() - began, self._records_read_at)
            return
        heads = self._look(inventory.entries, began)
        table.put(RECORDS, (), (), len(heads))
        table.put(SERIES_DROPPED, (), (), self._add_ranks(table, heads, began))
        self._add_directory(table, inventory)
        self._records_read_at = time.time()
        _add_health(table, "records", True, time.monotonic() - began, self._records_read_at)

    def _look(self, entries: Sequence[Entry], now: float) -> list[Snapshot]:
        """The headers of all records; whatever went is forgotten."""
        followed, looks, ended, refused = {}, {}, {}, {}
        heads = []
        spent, left = 0.0, math.ceil(WORK_SHARE * len(self._followed))
        for entry in sorted(entries, key=self._worked_out_at):
            path = entry.path
            if path in self._ended:
                ended[path] = self._ended[path]
                heads.append(ended[path].head)
                continue
            identity, until, _ = self._refused.get(path, ((), 0.0, ""))
            if identity == entry.identity and now < until:
                refused[path] = self._refused[path]
                continue
            known = self._followed.get(path) or Follower(path, self._lines)
            started = time.thread_time()
            try:
                look = known.look(spent < WORK_SECONDS or left > 0 or known.worked_out_at == -math.inf)
            except FileNotFoundError:
                continue  # removed between the listing and the look
            except (OSError, RecordError) as error:
                refused[path] = entry.identity, now + REFUSED_SECONDS, _reason(path.name, error)
                continue
            spent, left = spent + time.thread_time() - started, left - 1
            head = look.head
            heads.append(head)
            if head.up:
                followed[path], looks[path] = known, look
            else:
                ended[path] = _Ended(head, now - max(0.0, time.time() - last_seen(head)), now)
        self._followed, self._looks = followed, looks
        self._ended, self._refused = ended, refused
        return heads

    def _worked_out_at(self, entry: Entry) -> float:
        known = self._followed.get(entry.path)
        return -math.inf if known is None else known.worked_out_at

    def _add_ranks(self, table: Table, heads: Sequence[Snapshot], now: float) -> int:
        """Put the series of all ranks; returns how many series were left out."""
        mentioned = [
            head for head in newest(heads) if head.up or now - self._ended[head.path].gone <= TOMBSTONE_SECONDS
        ]
        chosen, dropped, room = _within_limits(mentioned), 0, SERIES_OF_ALL
        said: dict[Path, RankSeries] = {}
        for head in chosen:
            rank = self._living(head) if head.up else self._gone(head)
            if rank.count() > room:
                rank = RankSeries((), None, rank.dropped + rank.count())
            said[head.path], room = rank, room - rank.count()
        self._busyness.keep(self._looks.keys())
        self._claims.keep({(head.uid, clean(head.run)) for head in heads})
        for head in sorted(chosen, key=lambda head: head.created):
            rank = said[head.path]
            owner = self._claims.label(head.uid, clean(head.run)), clean(str(head.rank))
            for metric, own, number in rank.series:
                table.put(metric, owner, own, number)
            if rank.histogram is not None:
                table.put_histogram(STEP_SECONDS, owner, rank.histogram.buckets, rank.histogram.seconds)
            dropped += rank.dropped
        for ended in self._ended.values():
            ended.final = False
        return dropped

    def _living(self, head: Snapshot) -> RankSeries:
        look = self._looks[head.path]
        sample = self._sampler.latest()
        cores = self._busyness.cores(head, () if sample is None else sample.readings)
        busy = [] if cores is None else [(RANK_BUSY, (), cores)]
        return published(look.head, look.series, look.numbers, look.observations, (*look.gauges, *busy))

    def _gone(self, head: Snapshot) -> RankSeries:
        """The final values of a rank that ended since the last scrape, else what stays of it."""
        ended = self._ended[head.path]
        if ended.final or not ended.told:
            try:
                whole = read(head.path)
            except (OSError, RecordError):
                return tombstone(head)  # removed meanwhile
            ended.head = replace(whole, values={}, series=(), ring=(), observations=())
            ended.told = whole.death is not None or time.monotonic() - ended.found > BURIAL_SECONDS
            if ended.final:
                return _unless_open(rank_series(whole), ended)
        return _unless_open(tombstone(ended.head), ended)

    def _add_directory(self, table: Table, inventory: Inventory) -> None:
        reasons = Counter(reason for _, _, reason in self._refused.values())
        if passed_over := sum(inventory.passed_over.values()):
            reasons[_LIMIT] += passed_over
        for reason, count in reasons.items():
            table.put(RECORDS_REJECTED, (), (reason,), count)
        table.put(DIRECTORY_BYTES, (), (), inventory.bytes)
        table.put(DIRECTORY_FILES, (), (), inventory.files)
        if inventory.free_bytes is not None:
            table.put(DIRECTORY_FREE, (), (), inventory.free_bytes)

    # -- GPUs --------------------------------------------------------------------------------------------------------

    def _add_gpus(self, table: Table) -> None:
        sample, last = self._sampler.latest(), self._sampler.last_collected()
        if sample is not None:
            for reading in sample.readings:
                owner = tuple(map(clean, gpu_labels(reading)))
                for metric, labels, number in gpu_series(reading):
                    table.put(metric, owner, tuple(map(clean, labels)), number)
        _add_health(
            table,
            "nvml",
            sample is not None,
            None if last is None else last.seconds,
            None if last is None else last.taken_at,
        )


def _within_limits(heads: Sequence[Snapshot]) -> list[Snapshot]:
    """At most so many ranks of each user, the first of every user before the second of any: where there are too many
    series for all, each user has a share."""
    users: dict[int, list[Snapshot]] = defaultdict(list)
    for head in sorted(heads, key=lambda head: (head.up, head.created), reverse=True):
        users[head.uid].append(head)
    turns = zip_longest(*(ranks[:RANKS_PER_USER] for ranks in users.values()))
    return [head for turn in turns for head in turn if head is not None]


def _add_health(table: Table, source: str, up: bool, seconds: float | None, collected_at: float | None) -> None:
    table.put(SOURCE_UP, (), (source,), up)
    if seconds is not None:
        table.put(SOURCE_SECONDS, (), (source,), seconds)
    if collected_at is not None:
        table.put(SOURCE_TIME, (), (source,), collected_at)


def _reason(name: str, error: OSError | RecordError) -> str:
    said = f": {error.strerror}" if isinstance(error, OSError) else str(error).removeprefix(name)
    return next((reason for beginning, reason in _REASONS if said.startswith(beginning)), _UNREADABLE)
