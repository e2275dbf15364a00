"""Holds a descriptor of the process of every living rank: the kernel says at once when one ends, and which was first.

A look at the records once a second would not tell the rank that died from those that its launcher ended for it. The
pid is the one that the record's lease names, so that it is right in any namespace that can be seen from here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Collection
from pathlib import Path

from gpuwatch.death import Death
from gpuwatch.recordparts import RecordError, holder, opened

POLL_SECONDS = 0.5
"""How long a look may last during which no process ends: then new ones are taken in."""

MOST_PROCESSES = 512

STATUS_SECONDS = 2.0
"""How long a process may be dead before its parent has asked for its status: only then does the kernel tell others."""

_INFO = struct.Struct("Q52xi")  # struct pidfd_info: its mask first, the wait status at 60
_EXIT = 1 << 3
_ASK = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11  # PIDFD_GET_INFO


class DeathWatch:
    """A thread that waits for the ends of processes. ``keep`` and ``of`` are for one other thread."""

    def __init__(self, most: int = MOST_PROCESSES) -> None:
        """``most`` processes are watched at a time: each is an open file."""
        self._lock = threading.Lock()
        self._most = most
        self._held: dict[Path, int] = {}
        self._dead: dict[Path, Death] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuwatch-deaths", daemon=True)

    def start(self) -> None:
        """Begin to wait."""
        self._thread.start()

    def stop(self) -> None:
        """Wait no more, and give up all descriptors."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            for file in self._held.values():
                os.close(file)
            self._held.clear()

    def keep(self, living: Collection[Path]) -> None:
        """Watch the processes that hold these records, and forget those of records that are gone."""
        with self._lock:
            known = self._held.keys() | self._dead.keys()
            self._dead = {path: death for path, death in self._dead.items() if path.exists()}
        for path in living:
            if path not in known and len(self._held) < self._most:
                file = _process_of(path)
                if file is not None:
                    with self._lock:
                        self._held[path] = file

    def of(self, record: Path) -> Death | None:
        """How the process of a record ended; None where that was not seen."""
        with self._lock:
            return self._dead.get(record)

    def _run(self) -> None:
        waiting: dict[Path, tuple[int, Death, float]] = {}  # dead, and how is not known yet; the last is monotonic
        while not self._stopped.is_set():
            with self._lock:
                held = {file: path for path, file in self._held.items()}
            for file in _ended(held, 0.05 if waiting else POLL_SECONDS):
                path, death = held[file], Death(time.time())
                waiting[path] = file, death, time.monotonic()
                with self._lock:
                    del self._held[path]
                    self._dead[path] = death
            for path, (file, death, since) in list(waiting.items()):
                status = _status(file)
                if status is None and time.monotonic() - since < STATUS_SECONDS:
                    continue
                del waiting[path]
                os.close(file)
                with self._lock:
                    self._dead[path] = Death(death.at, status)
        for file, _, _ in waiting.values():
            os.close(file)


def _ended(files: Collection[int], seconds: float) -> list[int]:
    """Which of these processes end within this time, or ended before."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(1000 * seconds)]


def _process_of(record: Path) -> int | None:
    """A descriptor of the process that holds a record's lease; None where it cannot be had."""
    with contextlib.suppress(OSError, RecordError), opened(record) as (file, _):
        pid = holder(file)
        if pid:
            process = os.pidfd_open(pid)
            if holder(file) == pid:  # else it ended meanwhile, and the number may be another's
                return process
            os.close(process)
    return None


def _status(process: int) -> int | None:
    """The wait status of a process that has ended and was waited for; None before, or where the kernel is older."""
    answer = bytearray(_INFO.pack(_EXIT, 0))
    try:
        fcntl.ioctl(process, _ASK, answer)
    except OSError:
        return None
    mask, status = _INFO.unpack(answer)
    return int(status) if mask & _EXIT else None
