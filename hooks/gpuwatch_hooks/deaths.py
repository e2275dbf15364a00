"""Loader workers that died: which one, of what, and how much shared memory there was.

torch says it by a RuntimeError that names the process. Nothing is asked of the processes before that error is there:
whoever asks first takes the exit status away from torch.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from typing import Any

import torch

from gpuwatch.record import RecordWriter
from gpuwatch.sizes import size_text

RULE = "data-worker-died"
SHARED_MEMORY = "/dev/shm"
_NAMED = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\)")


def named(error: BaseException) -> list[int]:
    """The processes that torch's error says have died; none where it is about something else."""
    found = _NAMED.search(str(error))
    return [int(number) for number in found[1].split(",")] if found else []


def note(record: RecordWriter, workers: Mapping[int, int], iterators: list[Any], error: BaseException) -> list[int]:
    """Write down the dead workers that the error names, and return them.

    ``workers`` are the numbers of known workers by process; the iterators that still exist have their exit status.
    """
    dead = named(error)
    for pid in dead:
        where = f"worker {workers[pid]}" if pid in workers else "worker"
        number, manner = _manner(iterators, pid, f"{error}\n{error.__cause__}")
        record.observe(RULE, where, f"pid {pid}: {manner}; {_shared_memory()}", float(number))
    return dead


def _manner(iterators: list[Any], pid: int, message: str) -> tuple[int, str]:
    """The signal's number (0 when it was none), and in words how the process ended."""
    processes = [worker for iterator in iterators for worker in vars(iterator).get("_workers") or ()]
    status = next((worker.exitcode for worker in processes if worker.pid == pid), None)
    if status is None:
        status = _told(message)
    if status is None:
        return 0, "how it ended is not known"
    if status >= 0:
        return 0, f"it ended itself with status {status}"
    return -status, f"it was killed by {_signal_name(-status)}{_HINTS.get(-status, '')}"


def _told(message: str) -> int | None:
    """The exit status as torch's message has it, where the process itself is gone by now."""
    code = re.search(r"exited unexpectedly with exit code (\d+)", message)
    if code:
        return int(code[1])
    text = re.search(r"is killed by signal: ([^.]+)\.", message)
    names = {signal.strsignal(number): number for number in signal.valid_signals()}
    number = names.get(text[1].strip()) if text else None
    return None if number is None else -int(number)


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
