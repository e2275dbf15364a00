"""What the main thread of a rank is doing, as far as the kernel tells others."""

from __future__ import annotations

import os
from pathlib import Path

from gpuwatch.recordparts import RecordError, Snapshot, holder, opened

PROCESSES = Path("/proc")

RUNS, DEVICE, STOPPED, DEBUGGED = "runs", "device", "stopped", "debugged"
LOCK, SLEEP, POLL, PIPE, SOCKET, CHILD = "lock", "sleep", "poll", "pipe", "socket", "child"

_STATES = {"R": RUNS, "D": DEVICE, "T": STOPPED, "t": DEBUGGED}
_WAITS = {
    "futex": LOCK,
    "nanosleep": SLEEP,
    "poll": POLL,
    "select": POLL,
    "pipe": PIPE,
    "sk_wait": SOCKET,
    "do_wait": CHILD,
}
"""Parts of the names of the kernel's functions that threads wait in, the more telling ones first."""

ELSEWHERE = frozenset({DEVICE, STOPPED, DEBUGGED, SLEEP, PIPE, CHILD})
"""What a thread that waits for other ranks never does. It may run: some wait for a device in a loop."""


def doing(snapshot: Snapshot, processes: Path = PROCESSES) -> str | None:
    """What the main thread of a living rank does, in a word of this module; None where the kernel does not tell."""
    if not snapshot.up or snapshot.pid == os.getpid():  # whoever opens its own record loses its lease
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
    return next((word for part, word in _WAITS.items() if part in waits_in), None)


def not_waiting(snapshot: Snapshot) -> bool:
    """Whether the main thread surely does something else than to wait for other ranks."""
    found = doing(snapshot)
    return found in ELSEWHERE or (found == RUNS and snapshot.identity.get("device") == "cpu")
