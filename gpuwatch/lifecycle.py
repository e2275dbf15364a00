"""Which records of a directory still speak, and since when a rank is silent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpuwatch.reader import Snapshot, read_all


class Shelf:
    """The records of a directory, looked at again and again.

    Those of living processes are read each time and in full. Of the others, which change no more, only the headline is
    kept, and they are not read again: 60 of them whole are about 50 MB. Not for several threads at once.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ended: dict[Path, Snapshot] = {}

    def look(self) -> tuple[list[Snapshot], list[tuple[str, str]]]:
        """What :func:`gpuwatch.reader.read_all` gives; raises OSError as it does."""
        snapshots, rejected = read_all(self.directory, self._ended, _headline)
        self._ended = {snapshot.path: snapshot for snapshot in snapshots if not snapshot.up}
        return snapshots, rejected


def newest(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """One record per run and rank: a living one before a dead one, else the latest; a restart supersedes."""
    best: dict[tuple[str, int], Snapshot] = {}
    for snapshot in sorted(snapshots, key=lambda snapshot: (snapshot.up, snapshot.created)):
        best[snapshot.run, snapshot.rank] = snapshot
    return list(best.values())


def last_seen(snapshot: Snapshot) -> float:
    """Unix time of the end mark, else of the last thing that was seen of the rank."""
    return snapshot.ended if snapshot.ended is not None else snapshot.created + snapshot.run_seconds


def _headline(snapshot: Snapshot) -> Snapshot:
    return snapshot if snapshot.up else replace(snapshot, ring=(), values={}, series=(), observations=())
