"""``gpuwatch doctor``: is this machine fit to be watched, and what to do where it is not. Needs no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from gpuwatch.doctor.check import FAIL, OK, STATES, Check, Machine
from gpuwatch.doctor.hardware import gpu_checks
from gpuwatch.doctor.kernel import clock_checks, limit_checks, process_checks, shared_memory_checks
from gpuwatch.doctor.records import directory_checks, record_checks, space_checks
from gpuwatch.doctor.serving import daemon_checks, port_checks
from gpuwatch.doctor.versions import version_checks
from gpuwatch.follower import header
from gpuwatch.reader import Snapshot, read_all

__all__ = ["Check", "Machine", "as_json", "checks", "rendered", "status"]

_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}


def checks(directory: Path, machine: Machine | None = None) -> list[Check]:
    """Everything that is looked at, in the order in which a run meets it."""
    machine = machine or Machine()
    return list(_all(directory, machine))


def _all(directory: Path, machine: Machine) -> Iterator[Check]:
    yield from version_checks()
    yield from directory_checks(directory)
    yield from space_checks(directory)
    yield from record_checks(directory)
    yield from daemon_checks(directory)
    yield from port_checks(directory)
    yield from gpu_checks(machine)
    yield from clock_checks(machine, _snapshots(directory), time.time())
    yield from shared_memory_checks(machine)
    yield from limit_checks(machine)
    yield from process_checks(machine)


def status(found: Sequence[Check]) -> int:
    """1 when something does not work, else 0."""
    return int(any(check.state == FAIL for check in found))


def as_json(found: Sequence[Check]) -> str:
    """The checks as JSON, with the worst state of all."""
    worst = max((check.state for check in found), key=STATES.index, default=OK)
    body = [{"about": each.about, "state": each.state, "said": each.said, "todo": each.todo} for each in found]
    return json.dumps({"state": worst, "checks": body}, indent=2)


def rendered(found: Sequence[Check]) -> Table:
    """The checks for a terminal: a line each, what to do below it."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in found:
        lines = check.said + (f"\n→ {check.todo}" if check.todo else "")
        table.add_row(Text(check.state, _STYLES[check.state]), Text(check.about), Text(lines))
    return table


def _snapshots(directory: Path) -> list[Snapshot]:
    try:
        return read_all(directory, header)[0]
    except OSError:
        return []  # said by the check of the records
