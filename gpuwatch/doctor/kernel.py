"""What the kernel gives a training here: clocks, shared memory, control groups, the right to look at processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpuwatch.doctor.check import Check, Machine, content, warning, well
from gpuwatch.reader import Snapshot
from gpuwatch.report.wording import counted, printable, said

CLOCK, SHARED, LIMITS, PROCESSES = "clock", "shared memory", "limits", "processes"

SMALL_SHARED_BYTES = 1 << 30
"""Shared memory below which workers with a few batches ahead run out; containers get 64 MiB by default."""

NEARLY_FULL = 0.90
THROTTLED_SHARE = 0.10


def clock_checks(machine: Machine, snapshots: Sequence[Snapshot], now: float) -> Iterator[Check]:
    """Do the ages of records mean what they say? They are differences of the clock that starts with the machine."""
    boot = content(machine.proc / "sys/kernel/random/boot_id")
    shifted = _clock_offset(machine)
    earlier = [each for each in snapshots if boot and each.identity.get("boot") not in (None, "", boot)]
    ahead = [each for each in snapshots if each.created > now + 1]
    if shifted:
        yield warning(
            CLOCK,
            f"a time namespace shifts the monotonic clock by {shifted} s: ages of runs outside of it are wrong",
            "run the daemon and the training in the same time namespace",
        )
    if earlier:
        yield warning(
            CLOCK,
            f"{counted(len(earlier), 'record')} of before the last boot: {_names(earlier)}",
            "their ages say nothing; remove them once you have read them",
        )
    if ahead:
        yield warning(
            CLOCK,
            f"{counted(len(ahead), 'record')} from the future: {_names(ahead)}; the wall clock was set back",
            "keep the time by NTP (`timedatectl`)",
        )
    if not (shifted or earlier or ahead):
        yield well(CLOCK, "monotonic, the same as the records'" + ("" if boot else "; which boot this is is not known"))


def shared_memory_checks(machine: Machine) -> Iterator[Check]:
    """Is there room for the batches that workers hand over?"""
    place = machine.devices / "shm"
    try:
        room = os.statvfs(place)
    except OSError as error:
        yield warning(SHARED, f"{place}: {error.strerror}", "mount a tmpfs there; DataLoader workers need it")
        return
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"{place} has {said(free, 'bytes')} of {said(size, 'bytes')} free"
    if size and size < SMALL_SHARED_BYTES:
        yield warning(
            SHARED,
            f"{found}: little for workers' batches",
            "`docker run --shm-size=8g`, or an emptyDir of medium Memory",
        )
    elif size and free < (1 - NEARLY_FULL) * size:
        yield warning(SHARED, f"{found}: nearly full", f"look for what crashed runs left: `ls -l {place}`")
    else:
        yield well(SHARED, found)


def limit_checks(machine: Machine) -> Iterator[Check]:
    """What this process's control group allows, and whether it has hit the limits."""
    group = _group(machine)
    if group is None:
        yield well(LIMITS, "no control group of version 2 here; limits are not looked at")
        return
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    cores, throttled = _cores(group), _throttled(group)
    kills = _field(group / "memory.events", "oom_kill") or 0
    found = [
        f"memory {said(used, 'bytes')} of {'no limit' if limit is None else said(limit, 'bytes')}",
        "no limit of cores" if cores is None else f"{cores:g} cores",
    ]
    todo = []
    if limit and used is not None and used > NEARLY_FULL * limit:
        todo.append("raise the memory limit, or use fewer workers")
    if kills:
        found.append(f"the kernel has killed {counted(int(kills), 'process').replace('processs', 'processes')} in it")
        todo.append("see which in `dmesg`")
    if throttled is not None and throttled > THROTTLED_SHARE:
        found.append(f"held back by its quota in {said(throttled, 'ratio')} of periods")
        todo.append("raise the quota of cores, or use fewer threads and workers")
    text = ", ".join(found)
    yield warning(LIMITS, text, "; ".join(todo)) if todo else well(LIMITS, text)


def process_checks(machine: Machine) -> Iterator[Check]:
    """May the daemon see whose processes are on a GPU, and may a debugger look into a run that hangs?"""
    hidden = _hides_processes(machine)
    scope = content(machine.proc / "sys/kernel/yama/ptrace_scope")
    if hidden and os.geteuid():
        yield warning(
            PROCESSES,
            f"/proc is mounted with hidepid={printable(hidden)}: other users' processes on a GPU cannot be told apart",
            "add the daemon's group to the mount: gid=",
        )
    if scope in ("2", "3"):
        yield warning(
            PROCESSES,
            f"ptrace_scope is {scope}: "
            + ("only root" if scope == "2" else "nobody")
            + " can take the stack of a hang",
            "have `faulthandler.register(signal.SIGUSR1)` in the training, or lower kernel.yama.ptrace_scope",
        )
    if not (hidden and os.geteuid()) and scope not in ("2", "3"):
        yield well(
            PROCESSES,
            "can be seen" + ("; `py-spy dump` of a run needs root or its parent" if scope == "1" else ", and traced"),
        )


def _clock_offset(machine: Machine) -> str | None:
    text = content(machine.proc / "self/timens_offsets") or ""
    found = re.search(r"^monotonic\s+(-?\d+)\s+(\d+)", text, re.MULTILINE)
    return None if found is None or (found[1], found[2]) == ("0", "0") else found[1]


def _group(machine: Machine) -> Path | None:
    found = re.search(r"^0::(/.*)$", content(machine.proc / "self/cgroup") or "", re.MULTILINE)
    if found is None:
        return None
    # In a container the path may be the host's; what is mounted is the container's own.
    for place in (machine.cgroups / found[1].lstrip("/"), machine.cgroups):
        if (place / "memory.current").is_file() or (place / "cpu.stat").is_file():
            return place
    return None


def _number(path: Path) -> int | None:
    text = content(path)
    return int(text) if text is not None and text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", content(path) or "", re.MULTILINE)
    return None if found is None else int(found[1])


def _cores(group: Path) -> float | None:
    quota, _, period = (content(group / "cpu.max") or "").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _throttled(group: Path) -> float | None:
    periods, throttled = _field(group / "cpu.stat", "nr_periods"), _field(group / "cpu.stat", "nr_throttled")
    return throttled / periods if periods and throttled is not None else None


def _hides_processes(machine: Machine) -> str | None:
    mounts = content(machine.proc / "self/mounts") or ""
    found = re.search(r"^\S+ /proc proc \S*\bhidepid=(\w+)", mounts, re.MULTILINE)
    return None if found is None or found[1] in ("0", "off") else found[1]


def _names(snapshots: Sequence[Snapshot], most: int = 3) -> str:
    more = f" and {len(snapshots) - most} more" if len(snapshots) > most else ""
    return printable(", ".join(each.run for each in snapshots[:most])) + more
