"""The parts of a flight record, as whoever reads it takes them: the open file, the header, lines of the schema.

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.death import Death
from gpuwatch.layout import MAGIC, RECORD_BYTES, SLOT, VERSION, Phase, State, Word
from gpuwatch.oomkill import OomKill

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
    were completed since the phase was last written. ``death`` is what the daemon saw of the end of its process.
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
    place: int = 0
    death: Death | None = None

    @property
    def run(self) -> str:
        """Name of the run."""
        return str(self.identity["run"])

    @property
    def rank(self) -> int:
        """Rank within the run."""
        return int(str(self.identity["rank"]))


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


def leased(file: int) -> bool:
    """Whether another process holds the lock on the first byte of this open file."""
    return holder(file) is not None


def holder(file: int) -> int | None:
    """The process that holds that lock, as this one numbers it (0 where it cannot see it); None where it is free."""
    question = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    answer: bytes = fcntl.fcntl(file, fcntl.F_GETLK, question)
    kind, *_, pid = _LOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(0, int(pid))


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
        place=words[Word.PLACE],
    )


def _age(now: int, then: int) -> float:
    return max(0, now - then) / 1e9


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


def observation_in(slot: bytes) -> Observation | None:
    """What a settled slot says; None when it makes no sense."""
    _, size, magnitude, step = SLOT.unpack_from(slot)
    if -ABSURD < magnitude < ABSURD:
        with contextlib.suppress(*_HOSTILE):
            text = json.loads(slot[SLOT.size : SLOT.size + size])
            return Observation(str(text["rule"]), str(text["where"]), str(text["evidence"]), magnitude, step)
    return None
