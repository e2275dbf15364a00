"""A living rank's record, read again and again: each time only what changed since the last look.

A scrape of eight ranks that took every record apart anew cost 100 ms, most of it for text and steps that had not
changed.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gpuwatch import loadercosts, window
from gpuwatch.expr import series_key
from gpuwatch.layout import (
    OBSERVATION_BYTES,
    OBSERVATION_SLOTS,
    OBSERVATIONS_AT,
    RING_AT,
    RING_ROWS,
    ROW,
    SCHEMA_AT,
    SCHEMA_BYTES,
    VALUE_CAPACITY,
    VALUES_AT,
    Word,
)
from gpuwatch.recordparts import (
    ABSURD,
    Observation,
    RecordError,
    Snapshot,
    header_of,
    headline,
    identity_in,
    leased,
    observation_in,
    opened,
    refusing,
    series_in,
)
from gpuwatch.window import Gauge

MOST_TRIES = 8
"""Looks at an observation that is being rewritten."""

ADVICE_SECONDS = 30.0
"""A recommended setting is not worked out again before: it is no reading of the moment."""

MOST_LINES = 10_000
"""Different lines of schemas that are kept apart: ranks of one program share a few hundred."""

Made = TypeVar("Made")
"""What is made of a series."""


class Lines(Generic[Made]):
    """Lines of schemas, each taken apart once however many ranks have it: the key of the series, what is made of it."""

    def __init__(self, make: Callable[[str, Mapping[str, str]], Made]) -> None:
        self._make = make
        self._known: dict[str, tuple[str, Made]] = {}

    def parse(self, line: str) -> tuple[str, Made]:
        """The key of the series that a line names, and what is made of it. Raises what JSON of any shape can raise."""
        known = self._known.get(line)
        if known is None:
            name, labels = series_in(line)
            if len(self._known) >= MOST_LINES:
                self._known.clear()
            known = self._known[line] = series_key(name, labels), self._make(name, labels)
        return known


@dataclass(frozen=True)
class Look(Generic[Made]):
    """A record at one time: its header, and for a living rank what it says.

    ``numbers`` are those of the series in the same places, None where one is not known. ``gauges`` are worked out of
    the recent steps.
    """

    head: Snapshot
    series: Sequence[Made]
    numbers: Sequence[float | None]
    observations: Sequence[Observation]
    gauges: Sequence[Gauge]


class Follower(Generic[Made]):
    """Follows one record. Not for several threads at once."""

    def __init__(self, path: Path, lines: Lines[Made]) -> None:
        self.path = path
        self._lines = lines
        self._identity: Mapping[str, object] | None = None
        self._schema_used = 0
        self._series: list[Made] = []
        self._keys: list[str] = []
        self._slots: dict[int, tuple[bytes, Observation | None]] = {}
        self._gauges: tuple[Gauge, ...] = ()
        self._gauges_of = -1
        self._advice: tuple[Gauge, ...] = ()
        self._advised_at = 0.0
        self.worked_out_at = -math.inf

    def look(self, afresh: bool = True) -> Look[Made]:
        """The record now; nothing but its header when its process is gone. Raises as :func:`gpuwatch.reader.read`.

        Not ``afresh``, it gives the gauges of an earlier look, which cost most of the time.
        """
        with opened(self.path) as (file, status):
            words, head = self._header(file, status.st_uid)
            with refusing(self.path):
                self._extend(file, min(words[Word.SCHEMA_USED], SCHEMA_BYTES))
            if not head.up:
                return Look(head, (), (), (), ())
            numbers = self._numbers(file, words[Word.SERIES])
            return Look(
                head,
                self._series[: len(numbers)],
                numbers,
                self._observations(file, min(words[Word.OBSERVATIONS], OBSERVATION_SLOTS)),
                self._worked_out(file, words[Word.RING_HEAD], head, numbers) if afresh else self._gauges,
            )

    def _header(self, file: int, uid: int) -> tuple[tuple[int, ...], Snapshot]:
        words, self._identity = _header_in(self.path, file, self._identity)
        with refusing(self.path):
            return words, headline(self.path, uid, leased(file), words, self._identity)

    def _extend(self, file: int, used: int) -> None:
        """Take in the lines that were added to the schema."""
        if used == self._schema_used:
            return
        if used < self._schema_used:
            raise RecordError(f"{self.path.name} holds no valid schema: it shrinks")
        added = os.pread(file, used - self._schema_used, SCHEMA_AT + self._schema_used).decode().splitlines()
        rest = added if self._schema_used else added[1:]
        series = list(map(self._lines.parse, rest))
        self._schema_used = used
        self._keys += [key for key, _ in series]
        self._series += [made for _, made in series]

    def _numbers(self, file: int, count: int) -> list[float | None]:
        count = min(count, len(self._series), VALUE_CAPACITY)
        cells = os.pread(file, 8 * count, VALUES_AT).ljust(8 * count, b"\xff")  # all bits set is NaN
        return [number if -ABSURD < number < ABSURD else None for number in memoryview(cells).cast("d").tolist()]

    def _observations(self, file: int, count: int) -> list[Observation]:
        block = os.pread(file, count * OBSERVATION_BYTES, OBSERVATIONS_AT) if count else b""
        for slot in range(len(block) // OBSERVATION_BYTES):
            sequence = block[slot * OBSERVATION_BYTES :][:8]
            if slot not in self._slots or self._slots[slot][0] != sequence:
                self._settle(file, slot)
        return [seen for slot in range(count) if slot in self._slots and (seen := self._slots[slot][1]) is not None]

    def _settle(self, file: int, slot: int) -> None:
        """Keep what the slot says once its writer is done with it, what it said before until then."""
        at = OBSERVATIONS_AT + slot * OBSERVATION_BYTES
        for _ in range(MOST_TRIES):
            data = os.pread(file, OBSERVATION_BYTES, at)
            sequence = data[:8]
            if len(data) < OBSERVATION_BYTES or int.from_bytes(sequence, sys.byteorder) % 2:
                continue
            if os.pread(file, 8, at) == sequence:
                self._slots[slot] = sequence, observation_in(data)
                return

    def _worked_out(self, file: int, written: int, head: Snapshot, numbers: list[float | None]) -> tuple[Gauge, ...]:
        """The gauges of the recent steps, worked out again when there are new ones."""
        if written == self._gauges_of:
            return self._gauges
        block = os.pread(file, ROW.size * RING_ROWS, RING_AT)
        # What the writer was storing while the block was read lies over the oldest rows: leave them out.
        after = int.from_bytes(os.pread(file, 8, 8 * Word.RING_HEAD), sys.byteorder)
        steps = window.steps_in(block, after - RING_ROWS + 1, min(written, after))
        values = {key: number for key, number in zip(self._keys, numbers, strict=False) if number is not None}
        now = time.monotonic()
        if not self._advice or now - self._advised_at >= ADVICE_SECONDS:
            self._advice, self._advised_at = tuple(loadercosts.gauges(values, steps, head.step, head.run_seconds)), now
        self._gauges, self._gauges_of = (*window.gauges(steps), *self._advice), written
        self.worked_out_at = now
        return self._gauges


def header(path: Path) -> Snapshot:
    """What a record's header says now, without any series. Raises as :func:`gpuwatch.reader.read`."""
    with opened(path) as (file, status):
        words, identity = _header_in(path, file, None)
        with refusing(path):
            return headline(path, status.st_uid, leased(file), words, identity)


def _header_in(
    path: Path, file: int, identity: Mapping[str, object] | None
) -> tuple[tuple[int, ...], Mapping[str, object]]:
    """The words of the header, and the identity where it is not known yet."""
    words = header_of(path, lambda size, at: os.pread(file, size, at))
    if identity is None:
        with refusing(path):
            text = os.pread(file, min(words[Word.SCHEMA_USED], SCHEMA_BYTES), SCHEMA_AT)
            identity = identity_in(text.partition(b"\n")[0].decode())
    return words, identity
