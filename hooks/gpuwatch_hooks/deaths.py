"""Loader workers that died: which one, of what, and how much shared memory there was.

torch says it by a RuntimeError that names the process. Where it was reading a tensor from a worker that was about to
end (writing its core, say), the error is that of the connection and names nobody: then the workers themselves are
looked at, and again when that error ends the process. Their exit status stays for torch to collect.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gpuwatch.interruption import expected
from gpuwatch.record import RecordWriter
from gpuwatch.sizes import size_text

RULE = "data-worker-died"
SHARED_MEMORY = "/dev/shm"
_NAMED = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\)")


def named(error: BaseException) -> list[int]:
    """The processes that torch's error says have died; none where it is about something else."""
    found = _NAMED.search(str(error)) if isinstance(error, RuntimeError) else None
    return [int(number) for number in found[1].split(",")] if found else []


def cut_off(error: BaseException) -> bool:
    """Whether it may be that of a connection to a worker that is gone: reset, refused, its socket's file removed."""
    return isinstance(error, (OSError, EOFError))


def ended(pid: int) -> int | None:
    """The exit status of a child that has ended and was not waited for (a signal below zero); None of any other."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except expected(OSError):  # no child of this process, or waited for already
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def note(
    record: RecordWriter, workers: Mapping[int, int], iterators: list[Any], error: BaseException, dead: Iterable[int]
) -> None:
    """Write down these dead workers.

    ``workers`` are the numbers of known workers by process; the iterators that still exist have their exit status.
    """
    for pid in dead:
        where = f"worker {workers[pid]}" if pid in workers else "worker"
        number, manner = _manner(iterators, pid, f"{error}\n{error.__cause__}")
        record.observe(RULE, where, f"pid {pid}: {manner}; {_shared_memory()}", float(number))


def _manner(iterators: list[Any], pid: int, message: str) -> tuple[int, str]:
    """The signal's number (0 when it was none), and in words how the process ended."""
    status = ended(pid)
    if status is None:
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
    except expected(ValueError):
        return f"signal {number}"


def _shared_memory() -> str:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except expected(OSError):
        return "shared memory unknown"
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    return f"{SHARED_MEMORY} has {size_text(free)} free of {size_text(total)} (sharing by {strategy})"
