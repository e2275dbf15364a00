"""Host memory of the training process, read about once a second."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any

from gpuwatch.catalog import (
    CGROUP_OOM_KILLS,
    HOST_IN_USE,
    HOST_PEAK,
    HOST_RESIDENT,
    HOST_TOTAL,
    MACHINE_OOM_KILLS,
)
from gpuwatch.oomkill import machine_oom_kills, oom_kills
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.cgroups import groups, limited_memory
from gpuwatch_hooks.guard import guarded

SLOW_NANOSECONDS = 2_000_000
"""mallinfo2 walks the free lists: where that takes longer, it is asked one time in sixteen."""


_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class HostMemory:
    """Resident set, its peak, and the bytes the C allocator has handed out."""

    def __init__(self, record: RecordWriter) -> None:
        self.record = record
        self._page = os.sysconf("SC_PAGE_SIZE")
        total = host_total()
        if total is not None:
            record.values[record.series(HOST_TOTAL.name)] = total
        group = record.identity.get("cgroup")
        self._group = Path(group) if isinstance(group, str) else None
        self._kills_before = self._publish_kills() or 0
        self._mallinfo2 = _mallinfo2()
        self._turn = 0
        self._slow = False

    @guarded("memory")
    def publish(self) -> None:
        """Write the readings that this system has."""
        record = self.record
        resident = self._resident()
        if resident is not None:
            record.values[record.series(HOST_RESIDENT.name)] = resident
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        record.values[record.series(HOST_PEAK.name)] = peak * (1 if sys.platform == "darwin" else 1024)
        self._publish_kills()
        self._turn += 1
        if self._mallinfo2 is not None and (not self._slow or self._turn % 16 == 0):
            began = monotonic_ns()
            information = self._mallinfo2()
            self._slow = monotonic_ns() - began > SLOW_NANOSECONDS
            record.values[record.series(HOST_IN_USE.name)] = information.uordblks + information.hblkhd

    def kills(self) -> int:
        """How many processes of the control group the kernel has killed for memory since attach; 0 if untold."""
        count = None if self._group is None else oom_kills(self._group)
        return 0 if count is None else count - self._kills_before

    def _publish_kills(self) -> int | None:
        """Write both counts of out-of-memory kills: what they rise by after the last time tells how this rank died."""
        record = self.record
        of_group = None if self._group is None else oom_kills(self._group)
        of_machine = machine_oom_kills()
        if of_group is not None:
            record.values[record.series(CGROUP_OOM_KILLS.name)] = of_group
        if of_machine is not None:
            record.values[record.series(MACHINE_OOM_KILLS.name)] = of_machine
        return of_group

    def _resident(self) -> int | None:
        try:
            with open("/proc/self/statm", "rb") as file:
                return int(file.read().split()[1]) * self._page
        except (OSError, ValueError, IndexError):
            return None


def counting_group() -> dict[str, object]:
    """The control group that counts this process's memory, by path and inode: a reader may see another at that path."""
    for group in groups("memory"):
        if oom_kills(group) is not None:
            try:
                return {"cgroup": str(group), "cgroup_inode": group.stat().st_ino}
            except OSError:
                break
    return {}


def host_total() -> int | None:
    """Bytes of memory there are: of the machine, or of the control groups where they allow less; None if untold."""
    known = [group.limit for group in limited_memory()]
    with contextlib.suppress(OSError, ValueError):
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(known, default=None)


def bytes_in_use() -> int | None:
    """Bytes the C allocator has handed out, or None where it does not tell. Takes some ten microseconds and more."""
    if _ASK is None:
        return None
    information = _ASK()
    return int(information.uordblks + information.hblkhd)


def _mallinfo2() -> Callable[[], Any] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2  # glibc >= 2.33
    except (OSError, AttributeError):
        return None
    function.restype = _MallInfo
    function.argtypes = []
    return function


_ASK = _mallinfo2()
