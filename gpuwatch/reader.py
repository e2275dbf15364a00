"""The reading end of a flight record.

What is not a valid record is a :class:`gpuwatch.recordparts.RecordError` with one clear line.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from gpuwatch.catalog import OUT_OF_MEMORY
from gpuwatch.death import death_of
from gpuwatch.expr import series_key
from gpuwatch.interruption import expected
from gpuwatch.layout import (
    OBSERVATION_BYTES,
    OBSERVATION_SLOTS,
    OBSERVATIONS_AT,
    RING_AT,
    RING_ROWS,
    ROW,
    SCHEMA_AT,
    SCHEMA_BYTES,
    SNAPSHOT_SUFFIX,
    SUFFIX,
    VALUE_CAPACITY,
    VALUES_AT,
    State,
    Word,
)
from gpuwatch.oomkill import CERTAIN, oom_kill_of
from gpuwatch.recordparts import (
    ABSURD,
    Observation,
    Pread,
    RecordError,
    Series,
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

__all__ = ["Observation", "RecordError", "Snapshot", "leased", "parse", "read", "read_all", "remove_old"]


def read(path: Path) -> Snapshot:
    """Read one record.

    Raises RecordError for a file that is not one (wrong type, size, magic, version or content) and OSError for one
    that cannot be opened.
    """
    with opened(path) as (file, status):
        snapshot = parse(path, status.st_uid, leased(file), lambda size, at: os.pread(file, size, at))
    return snapshot if snapshot.up or snapshot.state >= State.CLEAN else _gone(_seen_to_end(snapshot))


def _seen_to_end(snapshot: Snapshot) -> Snapshot:
    """The same, with what the daemon saw of the end of its process."""
    death = death_of(snapshot.path, snapshot.uid)
    if death is None:
        return snapshot
    told = [Observation("run-dead", "", death.words, 1.0, snapshot.step)] if death.words else []
    return replace(snapshot, death=death, observations=(*snapshot.observations, *told))


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


def read_all(directory: Path, look: Callable[[Path], Snapshot] = read) -> tuple[list[Snapshot], list[tuple[str, str]]]:
    """Every record of a directory, oldest first, and ``(file name, reason)`` for what could not be read.

    ``look`` reads one: :func:`gpuwatch.follower.header` does where the headers will do, in a thousandth of the room.
    Raises OSError when the directory cannot be listed; one that does not exist is empty.
    """
    snapshots, rejected = [], []
    for path in _record_files(directory):
        try:
            snapshots.append(look(path))
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
    try:
        paths = list(_record_files(directory))
    except expected(OSError):
        return 0
    for path in paths:
        try:
            status = path.lstat()
        except expected(OSError):
            continue
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            files.append((status.st_mtime, path))
    return sum(_remove(path) for _, path in sorted(files, reverse=True)[keep:])


def _remove(path: Path) -> bool:
    """Remove a record that nobody writes, and the snapshot beside it; says whether it went."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if leased(file):
                return False
            path.unlink()
            path.with_suffix(SNAPSHOT_SUFFIX).unlink(missing_ok=True)
        finally:
            os.close(file)
    except expected(OSError):
        return False
    return True


def _record_files(directory: Path) -> Iterator[Path]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return
    for name in sorted(names):
        if name.endswith(SUFFIX) and not name.startswith("."):
            yield directory / name


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


def _schema(text: bytes) -> tuple[dict[str, object], list[Series]]:
    first, *rest = text.decode().splitlines()
    return identity_in(first), list(map(series_in, rest))


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
