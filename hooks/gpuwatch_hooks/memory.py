"""Host memory of the training process, read about once a second."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

from gpuwatch.catalog import (
    CGROUP_OOM_KILLS,
    HOST_IN_USE,
    HOST_PEAK,
    HOST_RESIDENT,
    HOST_TOTAL,
    MACHINE_OOM_KILLS,
)
from gpuwatch.interruption import expected
from gpuwatch.oomkill import machine_oom_kills, oom_kills
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.cgroups import groups, limited_memory
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.in_use import InUse


class HostMemory:
    """Resident set, its peak, and the bytes the C allocator has handed out."""

    def __init__(self, record: RecordWriter) -> None:
        self.record = record
        self._in_use = InUse()  # its own: the other reader shall not go short
        self._page = os.sysconf("SC_PAGE_SIZE")
        total = host_total()
        if total is not None:
            record.values[record.series(HOST_TOTAL.name)] = total
        group = record.identity.get("cgroup")
        self._group = Path(group) if isinstance(group, str) else None
        self._kills_before = self._publish_kills() or 0

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
        used = self._in_use.read()
        if used is not None:
            record.values[record.series(HOST_IN_USE.name)] = used

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
        except expected(OSError, ValueError, IndexError):
            return None


def counting_group() -> dict[str, object]:
    """The control group that counts this process's memory, by path and inode: a reader may see another at that path."""
    for group in groups("memory"):
        if oom_kills(group) is not None:
            try:
                return {"cgroup": str(group), "cgroup_inode": group.stat().st_ino}
            except expected(OSError):
                break
    return {}


def host_total() -> int | None:
    """Bytes of memory there are: of the machine, or of the control groups where they allow less; None if untold."""
    known = [group.limit for group in limited_memory()]
    with contextlib.suppress(OSError, ValueError):
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(known, default=None)
