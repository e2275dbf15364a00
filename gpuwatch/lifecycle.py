"""Which records of a directory still speak, and since when a rank is silent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuwatch.reader import Snapshot


def newest(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """One record per run and rank: a living one before a dead one, else the latest; a restart supersedes."""
    best: dict[tuple[str, int], Snapshot] = {}
    for snapshot in sorted(snapshots, key=lambda snapshot: (snapshot.up, snapshot.created)):
        best[snapshot.run, snapshot.rank] = snapshot
    return list(best.values())


def last_seen(snapshot: Snapshot) -> float:
    """Unix time of the end mark, else of the last thing that was seen of the rank."""
    return snapshot.ended if snapshot.ended is not None else snapshot.created + snapshot.run_seconds


def headline(snapshot: Snapshot) -> Snapshot:
    """The record without its steps and values: what is kept of a rank that is gone. A whole one is about 1 MB."""
    return replace(snapshot, ring=(), values={}, series=(), observations=())
