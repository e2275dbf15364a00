"""What the process of a rank that makes no progress is doing, in words.

Of ranks that wait for each other in a collective all wait alike, and the one that they wait for does something else.
"""

from __future__ import annotations

from pathlib import Path

from gpuwatch import mainthread
from gpuwatch.mainthread import PROCESSES, doing
from gpuwatch.reader import Snapshot

RULE = "run-hang"

_WORDS = {
    mainthread.RUNS: "its main thread is running",
    mainthread.DEVICE: "its main thread waits for a device or a file system",
    mainthread.STOPPED: "its main thread is stopped by a signal",
    mainthread.DEBUGGED: "its main thread is stopped by a debugger",
    mainthread.LOCK: "its main thread waits for a lock or another thread, as in a collective on the CPU",
    mainthread.SLEEP: "its main thread sleeps",
    mainthread.POLL: "its main thread waits for a pipe, a socket or a queue",
    mainthread.PIPE: "its main thread waits for a pipe",
    mainthread.SOCKET: "its main thread waits for a socket",
    mainthread.CHILD: "its main thread waits for a child process",
}


def stopped_evidence(snapshot: Snapshot, rule: str, processes: Path = PROCESSES) -> str | None:
    """The same as evidence of a run that hangs; None for any other rule, or where the kernel does not tell."""
    if rule != RULE:
        return None
    found = doing(snapshot, processes)
    return None if found is None else _WORDS[found]
