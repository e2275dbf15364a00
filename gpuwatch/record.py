"""The flight record: what one rank writes about itself, in a file that survives it. This is the writing end.

The writer maps the file and stores plain numbers into it; nothing it does can block, and a reader cannot disturb it.

The file's first byte carries a POSIX record lock, held as long as the writer lives: the kernel drops it when the
process dies, whatever killed it, and forked children do not inherit it. The writing process must therefore never open
its own record a second time: closing any descriptor of it would drop the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import stat
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from gpuwatch.expr import series_key
from gpuwatch.interruption import expected
from gpuwatch.layout import (
    HEADER_BYTES,
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
    SUFFIX,
    VALUE_CAPACITY,
    VALUES_AT,
    VERSION,
    State,
    Word,
)
from gpuwatch.reader import Snapshot, parse

__all__ = ["RecordFull", "RecordWriter"]

_NAN = float("nan")
_SLOT_REST = struct.Struct(SLOT.format[1:])  # all but the sequence


class RecordFull(ValueError):
    """No room for another series or observation."""


class RecordWriter:
    """The writing end. Hot code stores into ``values`` and ``words`` by index; the rest is for rare events.

    Raises OSError when the directory or the disk will not take the file. After a fork the child's stores go to
    private memory: only the process that made the record can change it.
    """

    def __init__(self, directory: Path, identity: Mapping[str, object]) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.identity = dict(identity)
        created = time.time_ns()
        name = f"{_slug(str(identity['run']))}.{identity['rank']}.{os.getpid()}-{created}{SUFFIX}"
        self.path = directory / name
        hidden = directory / f".{name}.new"
        self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        try:
            if os.stat(directory).st_mode & stat.S_ISGID:
                os.fchmod(self._file, 0o640)  # the group is the daemon's, which must read it whatever the umask here
            # Every page now, not at the first store: on a full disk a store into a hole is a SIGBUS in the training.
            os.posix_fallocate(self._file, 0, RECORD_BYTES)
            self._map: mmap.mmap | None = mmap.mmap(self._file, RECORD_BYTES)
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            self._bind(self._map)
            self._begin(created)
            os.rename(hidden, self.path)  # a reader sees the whole header or no file
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(hidden)
            os.close(self._file)
            raise

    def _bind(self, buffer: mmap.mmap | bytearray) -> None:
        self.buffer: mmap.mmap | bytearray = buffer
        view = memoryview(buffer)
        self.words = view[:HEADER_BYTES].cast("Q")
        self.values = view[VALUES_AT:RING_AT].cast("d")

    def _begin(self, created: int) -> None:
        self._names: dict[str, int] = {}
        self._observed: dict[tuple[str, str], int] = {}
        words = self.words
        words[Word.VERSION] = VERSION
        words[Word.PID] = os.getpid()
        words[Word.START_TIME] = _start_time()
        words[Word.CREATED] = created
        words[Word.HEARTBEAT] = words[Word.ATTACHED] = time.monotonic_ns()
        words[Word.STATE] = State.RUNNING
        self._line(self.identity)
        self.buffer[: len(MAGIC)] = MAGIC

    def _line(self, content: object) -> None:
        line = json.dumps(content, separators=(",", ":")).encode() + b"\n"
        used = self.words[Word.SCHEMA_USED]
        if used + len(line) > SCHEMA_BYTES:
            raise RecordFull(f"no room for {content!r}: the schema holds {SCHEMA_BYTES} bytes")
        self.buffer[SCHEMA_AT + used : SCHEMA_AT + used + len(line)] = line
        self.words[Word.SCHEMA_USED] = used + len(line)

    def series(self, name: str, **labels: str) -> int:
        """Index into ``values`` of this series, made on first use with the value NaN (not known)."""
        key = series_key(name, labels)
        index = self._names.get(key)
        if index is None:
            index = len(self._names)
            if index >= VALUE_CAPACITY:
                raise RecordFull(f"no room for {key}: a record holds {VALUE_CAPACITY} series")
            self._line([name, labels])
            self._names[key] = index
            self.values[index] = _NAN
            self.words[Word.SERIES] = index + 1
        return index

    def counter(self, name: str, **labels: str) -> int:
        """Like :meth:`series`, but it starts at 0."""
        index = self.series(name, **labels)
        self.values[index] = 0.0
        return index

    def step_row(self, *row: float) -> None:
        """Append a step to the ring; the columns are :class:`gpuwatch.layout.Column`'s."""
        head = self.words[Word.RING_HEAD]
        # Torn rows do no harm: a reader takes only rows below the head, and drops what was overwritten meanwhile.
        ROW.pack_into(self.buffer, RING_AT + (head % RING_ROWS) * ROW.size, *row)
        self.words[Word.RING_HEAD] = head + 1

    def recent_rows(self, count: int) -> list[tuple[float, ...]]:
        """The last steps of the ring, oldest first: at most ``count``."""
        head = self.words[Word.RING_HEAD]
        first = max(0, head - min(count, RING_ROWS))
        return [ROW.unpack_from(self.buffer, RING_AT + (at % RING_ROWS) * ROW.size) for at in range(first, head)]

    def observe(self, rule: str, where: str, evidence: str, magnitude: float) -> None:
        """Say, or say again, what was seen for a rule at a place. Raises RecordFull when all slots are taken."""
        slot = self._observed.get((rule, where))
        if slot is None:
            slot = len(self._observed)
            if slot >= OBSERVATION_SLOTS:
                raise RecordFull(f"no room for {rule}: a record holds {OBSERVATION_SLOTS} observations")
            self._observed[rule, where] = slot
        text = _observation_text(rule, where, evidence)
        at = OBSERVATIONS_AT + slot * OBSERVATION_BYTES
        head = memoryview(self.buffer)[at : at + SLOT.size].cast("Q")
        sequence = head[0] | 1
        head[0] = sequence
        # Not with pack_into on the whole head: that clears it first, and a sequence of 0 passes for a settled one.
        _SLOT_REST.pack_into(self.buffer, at + 8, len(text), magnitude, self.words[Word.STEP])
        self.buffer[at + SLOT.size : at + SLOT.size + len(text)] = text
        head[0] = sequence + 1
        self.words[Word.OBSERVATIONS] = len(self._observed)

    def snapshot(self) -> Snapshot:
        """What a reader would see, without opening the file (which would drop the lease)."""
        data = bytes(self.buffer)
        return parse(self.path, os.getuid(), True, lambda size, at: data[at : at + size])

    def close(self, state: State) -> None:
        """Write the end mark and give up the lease."""
        if self._map is None:
            return
        self.words[Word.ENDED] = time.time_ns()
        self.words[Word.STATE] = state
        last = bytearray(self._map)
        self._map = None
        self._bind(last)  # late stores go nowhere
        os.close(self._file)

    def discard(self) -> None:
        """Give up the lease and remove the file: there was no run."""
        self.close(State.DETACHED)
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def after_fork_in_child(self) -> None:
        """Send every later store of this process to private memory; the parent's record stays as it is."""
        if self._map is not None:
            private = bytearray(self._map)
            self._map = None
            self._bind(private)


def _observation_text(rule: str, where: str, evidence: str) -> bytes:
    room = OBSERVATION_BYTES - SLOT.size
    while True:
        text = json.dumps({"rule": rule, "where": where, "evidence": evidence}).encode()
        if len(text) <= room:
            return text
        # Evidence is shortened before the place is; escapes make characters cost up to six bytes.
        if len(evidence) > 16:
            evidence = evidence[: len(evidence) // 2] + "…"
        else:
            where = where[: len(where) // 2] + "…"


def _start_time() -> int:
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except expected(OSError, ValueError, IndexError):
        return time.monotonic_ns()


def _slug(text: str) -> str:
    # ASCII alone: a file name has 255 bytes, not letters. The identity inside has the whole name.
    return (
        "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "-_" else "_" for letter in text[:80])
        or "run"
    )
