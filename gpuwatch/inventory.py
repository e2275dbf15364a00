"""What lies in a directory of records: the files to read, and how much room they take.

Anybody may put files into a directory that users share. So what one user can make the daemon read is limited, and what
was passed over is counted.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from gpuwatch.layout import SUFFIX
from gpuwatch.recordparts import RecordError, leased, opened
from gpuwatch.sizes import size_text

FILES_LIMIT = 20_000
"""Files of a directory that are looked at; the rest of a listing is not even read."""

RECORDS_PER_USER = 256
"""Records of one user that are read: the newest. attach keeps fewer."""

LEAST_FREE_BYTES = 64 << 20
"""Space below which runs that start will soon fail to record, and nothing more can be written down of the dead."""

LARGE_BYTES = 1 << 30
"""A directory beyond this holds more than records: those of many users are a few hundred megabytes."""


@dataclass(frozen=True)
class Entry:
    """A file that should be a record. ``identity`` changes when another file takes its name, or when it is written."""

    path: Path
    uid: int
    modified: int
    identity: tuple[int, int, int]


@dataclass
class Inventory:
    """A directory at one time. ``bytes`` is what its files take on the disk; ``passed_over`` counts by reason."""

    entries: list[Entry] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    free_bytes: int | None = None
    passed_over: dict[str, int] = field(default_factory=dict)


_File = tuple[int, str, int, int]
"""A file that should be a record, before it is known whether it is read: modified, name, inode, size. The directory of
a careless user has ten thousand.
"""


class Leases:
    """Which records a process holds. Each is asked until it is not held: it never is again. For one thread."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def held(self, directory: Path, file: _File) -> bool:
        """Whether a process holds this record."""
        modified, name, inode, _ = file
        key = hash((inode, modified))
        if key in self._ended:
            return False
        try:
            with opened(directory / name) as (descriptor, _):
                if leased(descriptor):
                    return True
        except (OSError, RecordError):
            pass
        if len(self._ended) >= 2 * FILES_LIMIT:
            self._ended.clear()
        self._ended.add(key)
        return False


def take_inventory(directory: Path, leases: Leases | None = None) -> Inventory:
    """The directory as it is. One that does not exist is empty; raises OSError when it cannot be listed.

    Where a user has more records than are read, ``leases`` finds those that are old and still written: stores into a
    mapped file do not touch its times.
    """
    found = Inventory()
    users: dict[int, list[_File]] = defaultdict(list)
    try:
        with os.scandir(directory) as listing:
            for entry in listing:
                if found.files >= FILES_LIMIT:
                    found.passed_over["listing"] = 1
                    break
                found.files += 1
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # gone meanwhile
                if stat.S_ISREG(status.st_mode):
                    found.bytes += 512 * status.st_blocks
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    users[status.st_uid].append((status.st_mtime_ns, entry.name, status.st_ino, status.st_size))
        system = os.statvfs(directory)
    except FileNotFoundError:
        return Inventory()
    found.free_bytes = system.f_bavail * system.f_frsize
    for uid, files in users.items():
        files.sort()
        old, files = files[:-RECORDS_PER_USER], files[-RECORDS_PER_USER:]
        if old:
            found.passed_over["user"] = found.passed_over.get("user", 0) + len(old)
            written = [] if leases is None else [file for file in old if leases.held(directory, file)]
            files = [*files, *written][-RECORDS_PER_USER:]
        for modified, name, inode, size in files:
            found.entries.append(Entry(directory / name, uid, modified, (inode, size, modified)))
    found.entries.sort(key=lambda entry: entry.path.name)
    return found


def troubles(inventory: Inventory) -> list[str]:
    """What is wrong with the room that records take, a line each."""
    lines = []
    if inventory.free_bytes is not None and inventory.free_bytes < LEAST_FREE_BYTES:
        free = size_text(inventory.free_bytes)
        lines.append(f"only {free} are free where the records are: runs that start may not be recorded")
    if inventory.bytes > LARGE_BYTES:
        lines.append(f"the directory of records takes {size_text(inventory.bytes)} in {inventory.files} files")
    if "listing" in inventory.passed_over:
        lines.append(f"the directory of records holds over {FILES_LIMIT} files: records may be missed among them")
    if count := inventory.passed_over.get("user"):
        lines.append(f"{count} records are passed over: of a user the newest {RECORDS_PER_USER} are read")
    return lines
