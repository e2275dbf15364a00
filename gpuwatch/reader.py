"""The reading end of a flight record.

A reader never maps the file (one that shrinks under a mapping kills the process, a short read does not), opens it
without following links or waiting on a FIFO, and believes nothing in it: what is not a valid record is a
:class:`RecordError` with one clear line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from gpuwatch.catalog import OUT_OF_MEMORY
from gpuwatch.expr import series_key
from gpuwatch.layout import (
    MAGIC,
    OBSERVATION_BYTES,
    OBSERVATION_SLOTS,
    OBSERVATIONS_AT,
    RECORD_BYTES,
    RING_AT,
    RING_ROWS,
    ROW,
    SCHEMA_AT,
    SCHEMA_BYTES,
    SLOT,
    SNAPSHOT_SUFFIX,
    SUFFIX,
    VALUE_CAPACITY,
    VALUES_AT,
    VERSION,
    Phase,
    State,
    Word,
)
from gpuwatch.oomkill import CERTAIN, OomKill, oom_kill_of

__all__ = ["Observation", "RecordError", "Snapshot", "leased", "parse", "read", "read_all", "remove_old"]

_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_HEADER = struct.Struct(f"{len(Word)}Q")
ABSURD = 1e18  # no reading of ours is this large; NaN, infinities and what would overflow a sum are "not known"
_HOSTILE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What taking apart JSON of any shape can raise."""


Pread = Callable[[int, int], bytes]
"""Reads so many bytes from an offset: of a file, or of the writer's own memory."""

Series = tuple[str, Mapping[str, str]]
"""A series as a record names it."""


class RecordError(ValueError):
    """The file is not a record; the text says what came and what was expected."""


@dataclass(frozen=True)
class Observation:
    """A fact a hook saw for a rule: how much, where, and what it is based on."""

    rule: str
    where: str
    evidence: str
    magnitude: float
    step: int


@dataclass(frozen=True)
class Snapshot:
    """A record as it was read: plain values, nothing that changes.

    ``up`` is whether a process held the lease. ``values`` maps series keys to numbers, NaN left out. ``ring`` holds
    the recent steps, oldest first, each as :class:`gpuwatch.layout.Column` says. Ages are in seconds. ``oom_kill`` is
    what the kernel's counts say of a rank that is gone without an end mark. ``phase_is_current`` is False where steps
    were completed since the phase was last written.
    """

    path: Path
    uid: int
    identity: Mapping[str, object]
    up: bool
    pid: int
    created: float
    ended: float | None
    step: int
    step_age: float | None
    progress_age: float
    run_seconds: float
    phase: Phase
    state: State
    values: Mapping[str, float]
    series: tuple[tuple[str, Mapping[str, str]], ...]
    ring: tuple[tuple[float, ...], ...]
    observations: tuple[Observation, ...]
    oom_kill: OomKill | None = None
    phase_is_current: bool = True

    @property
    def run(self) -> str:
        """Name of the run."""
        return str(self.identity["run"])

    @property
    def rank(self) -> int:
        """Rank within the run."""
        return int(str(self.identity["rank"]))


_NOTHING: Mapping[Path, Snapshot] = MappingProxyType({})


def read(path: Path) -> Snapshot:
    """Read one record.

    Raises RecordError for a file that is not one (wrong type, size, magic, version or content) and OSError for one
    that cannot be opened.
    """
    with opened(path) as (file, status):
        snapshot = parse(path, status.st_uid, leased(file), lambda size, at: os.pread(file, size, at))
    return snapshot if snapshot.up or snapshot.state >= State.CLEAN else _gone(snapshot)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """The open file of a record, with what the system says of it. Raises as :func:`read` does."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise RecordError(f"{path.name} is not a regular file")
        if status.st_size != RECORD_BYTES:
            raise RecordError(f"{path.name} has {status.st_size} bytes, a record has {RECORD_BYTES}")
        yield file, status
    finally:
        os.close(file)


def _gone(snapshot: Snapshot) -> Snapshot:
    """The same, with what the kernel's counts say of a rank that left no end mark."""
    last_seen = snapshot.created + snapshot.run_seconds
    found = oom_kill_of(snapshot.path, snapshot.uid, snapshot.identity, snapshot.values, last_seen)
    if found is None:
        return snapshot
    seen, values, series = [Observation("run-dead", "", found.words, 1.0, snapshot.step)], {}, []
    if found.verdict == CERTAIN:
        kind = {"kind": "killed"}
        seen.append(Observation("mem-oom", "", f"at step {snapshot.step + 1}: {found.words}", 1.0, snapshot.step))
        values[series_key(OUT_OF_MEMORY.name, kind)] = 1.0
        series.append((OUT_OF_MEMORY.name, kind))
    return replace(
        snapshot,
        oom_kill=found,
        values={**snapshot.values, **values},
        series=(*snapshot.series, *series),
        observations=(*snapshot.observations, *seen),
    )


def read_all(
    directory: Path, known: Mapping[Path, Snapshot] = _NOTHING, trim: Callable[[Snapshot], Snapshot] | None = None
) -> tuple[list[Snapshot], list[tuple[str, str]]]:
    """Every record of a directory, oldest first, and ``(file name, reason)`` for what could not be read.

    Records in ``known`` are not read again but taken from there: for those whose process is gone, which change no
    more. ``trim`` cuts each down as it is read. Raises OSError when the directory cannot be listed; one that does not
    exist is empty.
    """
    snapshots, rejected = [], []
    for path in _record_files(directory):
        try:
            snapshot = known[path] if path in known else read(path)
            snapshots.append(snapshot if trim is None else trim(snapshot))
        except FileNotFoundError:
            continue  # removed between the listing and the look
        except RecordError as reason:
            rejected.append((path.name, str(reason)))
        except OSError as reason:
            rejected.append((path.name, f"{path.name}: {reason.strerror}"))
    return sorted(snapshots, key=lambda snapshot: snapshot.created), rejected


def remove_old(directory: Path, keep: int) -> int:
    """Remove this user's ended records beyond the newest ``keep``; returns how many went.

    Not for a process that is writing a record there: opening its own file would cost it the lease. A directory that
    this user may not list (shared ones are write-only) keeps what it has.
    """
    files = []
    with contextlib.suppress(OSError):
        for path in _record_files(directory):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                    files.append((status.st_mtime, path))
    removed = 0
    for _, path in sorted(files, reverse=True)[keep:]:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not leased(file):
                    path.unlink()
                    path.with_suffix(SNAPSHOT_SUFFIX).unlink(missing_ok=True)
                    removed += 1
            finally:
                os.close(file)
    return removed


def _record_files(directory: Path) -> Iterator[Path]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return
    for name in sorted(names):
        if name.endswith(SUFFIX) and not name.startswith("."):
            yield directory / name


def leased(file: int) -> bool:
    """Whether another process holds the lock on the first byte of this open file."""
    question = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    answer: bytes = fcntl.fcntl(file, fcntl.F_GETLK, question)
    return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def parse(path: Path, uid: int, up: bool, pread: Pread) -> Snapshot:
    """A snapshot out of ``pread(size, offset)``: a file's, or the writer's own memory. Raises RecordError."""
    words = header_of(path, pread)
    with refusing(path):
        identity, series = _schema(pread(min(words[Word.SCHEMA_USED], SCHEMA_BYTES), SCHEMA_AT))
        head = headline(path, uid, up, words, identity)
    count = min(words[Word.SERIES], len(series), VALUE_CAPACITY)
    numbers = memoryview(pread(8 * count, VALUES_AT).ljust(8 * count, b"\xff")).cast("d")
    return replace(
        head,
        values={
            series_key(name, labels): number
            for (name, labels), number in zip(series, numbers, strict=False)
            if -ABSURD < number < ABSURD
        },
        series=tuple(series[:count]),
        ring=_ring(words[Word.RING_HEAD], pread),
        observations=tuple(_observations(min(words[Word.OBSERVATIONS], OBSERVATION_SLOTS), pread)),
    )


def header_of(path: Path, pread: Pread) -> tuple[int, ...]:
    """The words of a record's header (:class:`gpuwatch.layout.Word`). Raises RecordError."""
    header = pread(_HEADER.size, 0)
    if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise RecordError(f"{path.name} does not begin with {MAGIC.decode()}")
    words: tuple[int, ...] = _HEADER.unpack(header)
    if words[Word.VERSION] != VERSION:
        raise RecordError(f"{path.name} has layout version {words[Word.VERSION]}, this reader knows {VERSION}")
    return words


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """What goes wrong in taking apart a record's text is a RecordError."""
    try:
        yield
    except _HOSTILE as error:
        raise RecordError(f"{path.name} holds no valid schema: {error}") from None


def headline(path: Path, uid: int, up: bool, words: Sequence[int], identity: Mapping[str, object]) -> Snapshot:
    """What a record's header says; a snapshot without any series. Raises ValueError for a phase or state unheard of."""
    now = time.monotonic_ns()
    stepped = words[Word.STEP_TIME]
    # Between looks only completed steps are written.
    seen = max(words[Word.HEARTBEAT], stepped)
    return Snapshot(
        path=path,
        uid=uid,
        identity=identity,
        up=up,
        pid=words[Word.PID],
        created=words[Word.CREATED] / 1e9,
        ended=words[Word.ENDED] / 1e9 if words[Word.ENDED] else None,
        step=words[Word.STEP],
        step_age=_age(now, stepped) if stepped else None,
        progress_age=_age(now, seen),
        run_seconds=max(0, seen - words[Word.ATTACHED]) / 1e9,
        phase=Phase(words[Word.PHASE]),
        state=State(words[Word.STATE]),
        values={},
        series=(),
        ring=(),
        observations=(),
        phase_is_current=words[Word.HEARTBEAT] >= stepped,
    )


def _age(now: int, then: int) -> float:
    return max(0, now - then) / 1e9


def _schema(text: bytes) -> tuple[dict[str, object], list[Series]]:
    first, *rest = text.decode().splitlines()
    return identity_in(first), list(map(series_in, rest))


def identity_in(line: str) -> dict[str, object]:
    """The identity that the first line of a schema holds. Raises what JSON of any shape can raise."""
    identity = json.loads(line)
    if not isinstance(identity, dict):
        raise ValueError("the identity is not an object")
    str(identity["run"]), int(str(identity["rank"]))
    return identity


def series_in(line: str) -> Series:
    """The series that any other line of a schema names. Raises what JSON of any shape can raise."""
    name, labels = json.loads(line)
    if not isinstance(name, str) or not all(isinstance(part, str) for item in labels.items() for part in item):
        raise ValueError(f"not a series: {line[:80]}")
    return name, labels


def _ring(head: int, pread: Pread) -> tuple[tuple[float, ...], ...]:
    if not head:
        return ()
    block = pread(ROW.size * RING_ROWS, RING_AT)
    after = int.from_bytes(pread(8, 8 * Word.RING_HEAD), sys.byteorder)
    # What the writer was storing while the block was read lies over the oldest rows: leave them out.
    oldest = max(0, after - RING_ROWS + 1)
    rows = list(ROW.iter_unpack(block[: len(block) - len(block) % ROW.size]))
    return tuple(
        rows[number % RING_ROWS] for number in range(oldest, min(head, after)) if number % RING_ROWS < len(rows)
    )


def _observations(count: int, pread: Pread) -> Iterator[Observation]:
    for slot in range(count):
        at = OBSERVATIONS_AT + slot * OBSERVATION_BYTES
        for _ in range(8):  # being rewritten: look again, and leave it out when it never settles
            data = pread(OBSERVATION_BYTES, at)
            if len(data) < OBSERVATION_BYTES:
                break
            if data[0 if sys.byteorder == "little" else 7] % 2 or pread(8, at) != data[:8]:
                continue
            if (seen := observation_in(data)) is not None:
                yield seen
            break


def observation_in(slot: bytes) -> Observation | None:
    """What a settled slot says; None when it makes no sense."""
    _, size, magnitude, step = SLOT.unpack_from(slot)
    if -ABSURD < magnitude < ABSURD:
        with contextlib.suppress(*_HOSTILE):
            text = json.loads(slot[SLOT.size : SLOT.size + size])
            return Observation(str(text["rule"]), str(text["where"]), str(text["evidence"]), magnitude, step)
    return None
