"""Which records make up a run: the same name, the same user, the same start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from gpuwatch.follower import header
from gpuwatch.layout import State
from gpuwatch.reader import RecordError, Snapshot, read, read_all

__all__ = ["RunError", "find_run", "nothing_in", "select_run", "started_together", "whole"]

START_SPREAD_SECONDS = 30.0
"""Ranks of one start attach within this time of each other, also when one of them fails at once."""

NAMES_SHOWN = 5


class RunError(LookupError):
    """No such run; the text is one line that says what there is instead."""


def find_run(directory: Path, name: str | None = None) -> list[Snapshot]:
    """The records of a run, one per rank, lowest rank first: the latest run, or the one of that name or unique prefix.

    Files that are not records are passed over. Raises RunError when there is no such run and OSError when the
    directory cannot be read.
    """
    heads, _ = read_all(directory, header)
    if not heads:
        raise RunError(nothing_in(directory))
    return whole(select_run(heads, name))[0]


def nothing_in(directory: Path) -> str:
    """What to say, and to do, when a directory holds no record."""
    return (
        f"no runs recorded in {directory}: add `gpuwatch.attach(model, loader)` to a training script and run it, or "
        "name another directory with --dir"
    )


def whole(heads: Sequence[Snapshot]) -> tuple[list[Snapshot], list[tuple[str, str]]]:
    """The records of a run with everything, of which the headers are known.

    With ``(file name, reason)`` for those that are passed over. Raises RunError with the reason when none can be read.
    """
    snapshots, rejected = [], []
    for path in [head.path for head in heads]:
        try:
            snapshots.append(read(path))
        except RecordError as reason:
            rejected.append((path.name, str(reason)))
        except OSError as reason:
            rejected.append((path.name, f"{path.name}: {reason.strerror}"))
    if not snapshots:
        raise RunError(rejected[0][1])
    return snapshots, rejected


def select_run(snapshots: Sequence[Snapshot], name: str | None = None) -> list[Snapshot]:
    """The same among snapshots that were read already; there must be one at least."""
    full_name = None if name is None else _full_name(snapshots, name)
    candidates = [snapshot for snapshot in snapshots if full_name is None or snapshot.run == full_name]
    newest = max(candidates, key=lambda snapshot: snapshot.created)
    return started_together(newest, snapshots)


def started_together(newest: Snapshot, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """The newest record of each rank that belongs to the same start of the same user's run as ``newest``."""
    ranks: dict[int, Snapshot] = {}
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.created):
        if _same_start(snapshot, newest):
            ranks[snapshot.rank] = snapshot
    return [ranks[rank] for rank in sorted(ranks)]


def _same_start(snapshot: Snapshot, newest: Snapshot) -> bool:
    if (snapshot.run, snapshot.uid) != (newest.run, newest.uid):
        return False
    if snapshot.identity.get("world_size") != newest.identity.get("world_size"):
        return False
    return _last_seen(snapshot) >= newest.created or newest.created - snapshot.created <= START_SPREAD_SECONDS


def _last_seen(snapshot: Snapshot) -> float:
    if snapshot.up and snapshot.state < State.CLEAN:
        return math.inf
    return snapshot.created + snapshot.run_seconds if snapshot.ended is None else snapshot.ended


def _full_name(snapshots: Sequence[Snapshot], name: str) -> str:
    # newest first, so that what is listed is what was run last
    names = list(dict.fromkeys(snapshot.run for snapshot in sorted(snapshots, key=lambda snapshot: -snapshot.created)))
    if name in names:
        return name
    matching = [full for full in names if full.startswith(name)] if name else []
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise RunError(f"several runs begin with {name!r}: {_listed(matching)}")
    raise RunError(f"no run {name!r}; there are: {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} older" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
