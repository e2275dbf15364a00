"""What the process of a rank that makes no progress is doing, as far as the kernel tells others.

Between looks a record does not say where in a step its rank is. Of ranks that wait for each other in a collective all
wait alike, and the one that they wait for does something else.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpuwatch.reader import Snapshot
from gpuwatch.recordparts import RecordError, holder, opened

RULE = "run-hang"

_STATES = {
    "R": "its main thread is running",
    "D": "its main thread waits for a device or a file system",
    "T": "its main thread is stopped by a signal",
    "t": "its main thread is stopped by a debugger",
}
_WAITS = {
    "futex": "its main thread waits for a lock or another thread, as in a collective on the CPU",
    "nanosleep": "its main thread sleeps",
    "poll": "its main thread waits for a pipe, a socket or a queue",
    "select": "its main thread waits for a pipe, a socket or a queue",
    "pipe": "its main thread waits for a pipe",
    "sk_wait": "its main thread waits for a socket",
    "do_wait": "its main thread waits for a child process",
}
"""Parts of the names of the kernel's functions that threads wait in, the more telling ones first."""


def stopped_evidence(snapshot: Snapshot, rule: str, processes: Path = Path("/proc")) -> str | None:
    """The same as evidence of a run that hangs; None for any other rule, or where the kernel does not tell."""
    if rule != RULE or not snapshot.up or snapshot.pid == os.getpid():  # whoever opens its own record loses its lease
        return None
    try:
        with opened(snapshot.path) as (file, _):
            pid = holder(file)
        if not pid or pid == os.getpid():
            return None
        state = (processes / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        if state in _STATES:
            return _STATES[state]
        waits_in = (processes / str(pid) / "wchan").read_text()
    except (OSError, RecordError, IndexError, ValueError):
        return None
    return next((words for part, words in _WAITS.items() if part in waits_in), None)
