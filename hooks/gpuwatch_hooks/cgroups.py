"""What the control groups of this process allow it: memory and CPU time, by version 2 and by version 1.

A group's limit holds for the groups within it too: the smallest on the way up counts. In a container the group that
``/proc/self/cgroup`` names is often not there to see, and what is mounted at the top is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.interruption import expected

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and what of it can be dropped, as version 2 and version 1 name them."""


def cpu_quota(mount: Path = _MOUNT, own: Path = _OWN) -> float | None:
    """Cores that this process and its group may use, by their CPU quota; None without one."""
    known = []
    for group in groups("cpu", mount, own):
        fields = _text(group / "cpu.max").split()
        if not fields:  # version 1
            fields = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(fields) == 2 and all(field.isdecimal() for field in fields) and int(fields[1]):  # not "max", not -1
            known.append(int(fields[0]) / int(fields[1]))
    return min(known, default=None)


@dataclass(frozen=True)
class MemoryGroup:
    """A control group whose memory is limited: how many bytes, and where it says what is used of them."""

    limit: int
    usage: Path
    table: Path
    droppable: str

    def left(self) -> int | None:
        """Bytes that are free to use; what is cached of files and can be dropped is. None where it does not tell."""
        used = _text(self.usage).strip()
        if not used.isdecimal():
            return None
        return max(0, self.limit - max(0, int(used) - _field(_text(self.table), self.droppable)))


def limited_memory(mount: Path = _MOUNT, own: Path = _OWN) -> list[MemoryGroup]:
    """The groups that limit the memory of this process."""
    found = []
    for group in groups("memory", mount, own):
        table = group / "memory.stat"
        for limit, usage, droppable in _MEMORY_FILES:
            text = _text(group / limit).strip()
            # Version 1 says "no limit" by a number that no machine has.
            if text.isdecimal() and int(text) < 1 << 60:
                found.append(MemoryGroup(int(text), group / usage, table, droppable))
    return found


def groups(controller: str, mount: Path = _MOUNT, own: Path = _OWN) -> Iterator[Path]:
    """The directories of this process's groups, its own first, then those it lies in."""
    for line in _text(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        group = top / path.lstrip("/")
        while group != top and top in group.parents:
            yield group
            group = group.parent
        yield top


def _field(table: str, name: str) -> int:
    for line in table.splitlines():
        key, _, number = line.partition(" ")
        if key == name and number.isdecimal():
            return int(number)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except expected(OSError):
        return ""
