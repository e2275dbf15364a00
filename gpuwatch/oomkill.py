"""Did the kernel kill a rank that is gone without an end mark, because memory had run out?

The kernel counts the processes that it kills for memory: for each control group (``oom_kill`` in ``memory.events``, or
in ``memory.oom_control`` of version 1) and for the machine (``/proc/vmstat``). A rank writes both counts down about
once a second; what they rose by since is known to whoever reads the record after its death. The counts go on rising
later, for other processes: so the daemon, which looks within seconds, keeps its answer in the rank's post-mortem.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuwatch.catalog import CGROUP_OOM_KILLS, HOST_RESIDENT, HOST_TOTAL, LOCAL_RANKS, MACHINE_OOM_KILLS
from gpuwatch.interruption import expected
from gpuwatch.layout import POST_MORTEMS
from gpuwatch.sizes import size_text

CERTAIN, LIKELY, NONE = "certain", "likely", "none"
"""What is known: its own control group counted a kill; something wider did; none was counted."""

KEY = "oom_kill"
"""Where a post-mortem keeps the answer."""

FRESH_SECONDS = 3600.0
"""A count that rose within this time of the rank's last sign of life is put down to it."""

_VMSTAT = Path("/proc/vmstat")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_EVENTS = ("memory.events", "memory.oom_control")
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class OomKill:
    """The answer, one of CERTAIN, LIKELY and NONE, and what it is based on."""

    verdict: str
    words: str

    def as_dict(self) -> dict[str, str]:
        """As a post-mortem has it."""
        return asdict(self)


def oom_kills(group: Path) -> int | None:
    """How many processes of a control group (and, in version 2, of those in it) the kernel killed for memory."""
    for name in _EVENTS:
        count = _field(group / name, "oom_kill")
        if count is not None:
            return count
    return None


def machine_oom_kills(path: Path = _VMSTAT) -> int | None:
    """How many processes of the machine the kernel killed for memory since it was started."""
    return _field(path, "oom_kill")


def boot() -> str:
    """The name of the kernel's present run, or an empty text: its counts begin with it."""
    try:
        return _BOOT.read_text().strip()
    except expected(OSError):
        return ""


def oom_kill_of(
    record: Path, uid: int, identity: Mapping[str, object], values: Mapping[str, float], last_seen: float
) -> OomKill | None:
    """What is known of a rank that is gone without an end mark; None where nothing is.

    ``values`` are the record's series, ``last_seen`` the Unix time of its last sign of life.
    """
    written = _written(record, uid)
    if written is not None:
        return written
    if not identity.get("boot") or identity["boot"] != boot():
        return None
    silent = time.time() - last_seen
    group = _same_group(identity)
    now, before = None if group is None else oom_kills(group), values.get(CGROUP_OOM_KILLS.name)
    if now is not None and before is not None:
        return _by_group(str(group), int(now - before), silent, identity, values)
    now, before = machine_oom_kills(), values.get(MACHINE_OOM_KILLS.name)
    if now is None or before is None:
        return None
    if now <= before:
        return OomKill(NONE, "the kernel counted no out-of-memory kill on this machine")
    return OomKill(LIKELY, f"{_counted('this machine', int(now - before))}; {_resident(values)}")


def _by_group(
    group: str, kills: int, silent: float, identity: Mapping[str, object], values: Mapping[str, float]
) -> OomKill:
    if kills <= 0:
        return OomKill(NONE, f"the kernel counted no out-of-memory kill in its control group {group}")
    words = f"{_counted(f'its control group {group}', kills)}; {_resident(values)}"
    # Ranks that share a group go down together: one is killed for memory, the launcher ends the others.
    ranks = values.get(LOCAL_RANKS.name, identity.get("world_size", 1))
    if silent > FRESH_SECONDS or not isinstance(ranks, (int, float)) or ranks > kills:
        return OomKill(LIKELY, f"{words}; this rank, or another process of the group")
    return OomKill(CERTAIN, words)


def _counted(where: str, kills: int) -> str:
    return (
        f"the kernel counted {kills:,} out-of-memory kill{'s' if kills > 1 else ''} in {where} since its last reading"
    )


def _resident(values: Mapping[str, float]) -> str:
    resident, total = values.get(HOST_RESIDENT.name), values.get(HOST_TOTAL.name)
    if resident is None:
        return "its own memory is not known"
    limit = "" if total is None else f" of the {size_text(total)} it may have"
    return f"it last held {size_text(resident)}{limit}, its workers not counted"


def _same_group(identity: Mapping[str, object]) -> Path | None:
    """The control group of the rank, where it is still there and to be seen from here."""
    path, inode = identity.get("cgroup"), identity.get("cgroup_inode")
    if not isinstance(path, str) or not path.startswith("/sys/fs/cgroup/") or ".." in path.split("/"):
        return None
    try:
        found = os.stat(path).st_ino
    except expected(OSError, ValueError):
        return None
    return Path(path) if found == inode else None


def _written(record: Path, uid: int) -> OomKill | None:
    """The answer that the daemon wrote down when it found the rank dead."""
    found = (written_down(record, uid) or {}).get(KEY)
    return OomKill(str(found["verdict"]), str(found["words"])) if isinstance(found, dict) and _whole(found) else None


def _whole(found: Mapping[str, object]) -> bool:
    return "verdict" in found and "words" in found


def written_down(record: Path, uid: int) -> Mapping[str, object] | None:
    """The post-mortem of a record's rank, where there is one that can be believed: the user's own, or the daemon's."""
    path = record.parent / POST_MORTEMS / f"{record.stem}.json"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except expected(OSError):
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid(), uid):
            return None
        found = json.loads(os.pread(file, _LARGEST_BYTES, 0))
        return found if isinstance(found, dict) else None
    except (LookupError, OSError, RecursionError, TypeError, ValueError):
        return None
    finally:
        os.close(file)


def _field(path: Path, name: str) -> int | None:
    try:
        with open(path, "rb") as file:
            lines = file.read(_LARGEST_BYTES).splitlines()
    except expected(OSError):
        return None
    for line in lines:
        key, _, number = line.partition(b" ")
        if key == name.encode() and number.strip().isdigit():
            return int(number)
    return None
