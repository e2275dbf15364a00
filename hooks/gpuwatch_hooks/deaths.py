"""Loader workers that died: which one, of what, and how much shared memory there was.

torch says it by a RuntimeError that names the process. Nothing is asked of the processes before that error is there:
whoever asks first takes the exit status away from torch.
"""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import torch

from gpuwatch.catalog import WORKER_DEATHS
from gpuwatch.record import RecordWriter
from gpuwatch.sizes import size_text

RULE = "data-worker-died"
SHARED_MEMORY = "/dev/shm"
_NAMED = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\)")


def named(error: BaseException) -> list[int]:
    """The processes that torch's error says have died; none where it is about something else."""
    found = _NAMED.search(str(error))
    return [int(number) for number in found[1].split(",")] if found else []


def note(record: RecordWriter, iterators: list[Any], error: BaseException, said: set[int]) -> None:
    """Write down each dead worker that the error names, once: ``said`` are those that were."""
    for pid in named(error):
        if pid in said:
            continue
        said.add(pid)
        worker = _worker(iterators, pid)
        where = f"pid {pid}" if worker is None else f"worker {worker} (pid {pid})"
        number, manner = _manner(iterators, pid, str(error))
        deaths = record.series(WORKER_DEATHS.name)
        values = record.values
        values[deaths] = len(said)
        record.observe(RULE, where, f"{manner}; {_shared_memory()}", float(number))


def _worker(iterators: list[Any], pid: int) -> int | None:
    for iterator in iterators:
        for number, worker in enumerate(vars(iterator).get("_workers") or ()):
            if worker.pid == pid:
                return number
    return None


def _manner(iterators: list[Any], pid: int, message: str) -> tuple[int, str]:
    """The signal's number (0 when it was none), and in words how the process ended."""
    status = next(
        (
            worker.exitcode
            for iterator in iterators
            for worker in vars(iterator).get("_workers") or ()
            if worker.pid == pid
        ),
        None,
    )
    if status is None:
        return 0, message.splitlines()[0]
    if status >= 0:
        return 0, f"it ended itself with status {status}"
    return -status, f"it was killed by {_signal_name(-status)}{_HINTS.get(-status, '')}"


_HINTS = {
    int(signal.SIGKILL): " (as the kernel does when memory runs out)",
    int(signal.SIGBUS): " (as when shared memory is full)",
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shared_memory() -> str:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return "shared memory unknown"
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    return f"{SHARED_MEMORY} has {size_text(free)} free of {size_text(total)} (sharing by {strategy})"
