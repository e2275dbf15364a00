"""Which records of a directory still speak, since when a rank is silent, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from gpuwatch.follower import header
from gpuwatch.inventory import Inventory, Leases, take_inventory
from gpuwatch.layout import State
from gpuwatch.oomkill import CERTAIN
from gpuwatch.reader import RecordError, Snapshot

STATES = ("killed", "exception", "running", "detached", "clean")
"""States of a run, most alarming first: a run of several ranks is in the most alarming state of any."""

OOM_KILLED = "oom-killed"


class Census:
    """Who lives in a directory: the headers of its records alone. Not for several threads at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._leases = Leases()
        self._ended: dict[tuple[Path, tuple[int, int, int]], Snapshot] = {}

    def take(self) -> tuple[list[Snapshot], Inventory]:
        """The headers of all records now, without any series. Raises OSError when the directory cannot be listed."""
        inventory = take_inventory(self.directory, self._leases)
        snapshots, ended = [], {}
        for entry in inventory.entries:
            key = entry.path, entry.identity
            snapshot = self._ended.get(key)
            if snapshot is None:
                try:
                    snapshot = header(entry.path)
                except (OSError, RecordError):
                    continue  # the metrics say why
            if not snapshot.up:
                ended[key] = snapshot
            snapshots.append(snapshot)
        self._ended = ended
        return snapshots, inventory


class Claims:
    """Whose run goes by its plain name, where users of one node have runs of one name: who came first."""

    def __init__(self) -> None:
        self._labels: dict[tuple[int, str], str] = {}

    def label(self, uid: int, run: str) -> str:
        """The name to publish a user's run by: no other user's has the same one."""
        label = self._labels.get((uid, run))
        if label is None:
            label = run
            while label in self._labels.values():
                label = f"{label}@{uid}"
            self._labels[uid, run] = label
        return label

    def keep(self, runs: Collection[tuple[int, str]]) -> None:
        """Forget the runs that are no more."""
        self._labels = {run: label for run, label in self._labels.items() if run in runs}


def newest(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """One record per user, run and rank: a living one before a dead one, else the latest; a restart supersedes.

    So it does where it has fewer ranks, or numbers them anew: those that it has no more are not mentioned.
    """
    best: dict[tuple[int, str, int], Snapshot] = {}
    last: dict[tuple[int, str], Snapshot] = {}
    at: dict[tuple[int, str, str, str], Snapshot] = {}
    for snapshot in sorted(snapshots, key=lambda snapshot: (snapshot.up, snapshot.created)):
        best[snapshot.uid, snapshot.run, snapshot.rank] = last[snapshot.uid, snapshot.run] = snapshot
        at[_place(snapshot)] = snapshot
    return [
        each
        for each in best.values()
        if each.up or (_start(each) == _start(last[each.uid, each.run]) and at[_place(each)] is each)
    ]


def _start(snapshot: Snapshot) -> tuple[object, object]:
    """What the ranks of one start have in common, and those of the next one may not have."""
    return snapshot.identity.get("restart"), snapshot.identity.get("world_size")


def _place(snapshot: Snapshot) -> tuple[int, str, str, str]:
    """Where on which node a rank runs: one start has no other one there."""
    node, local = snapshot.identity.get("node"), snapshot.identity.get("local_rank")
    return snapshot.uid, snapshot.run, str(node), f"rank {snapshot.rank}" if local is None else str(local)


def last_seen(snapshot: Snapshot) -> float:
    """Unix time of the end mark, else of the last thing that was seen of the rank."""
    return snapshot.ended if snapshot.ended is not None else snapshot.created + snapshot.run_seconds


def state_of(snapshot: Snapshot) -> str:
    """How far a rank got, one of STATES."""
    ended = {State.CLEAN: "clean", State.EXCEPTION: "exception", State.DETACHED: "detached"}
    return ended.get(snapshot.state, "running" if snapshot.up else "killed")


def exit_of(snapshot: Snapshot) -> str:
    """How a rank that runs no more ended, in a word: its state, or that the kernel killed it for memory."""
    kill = snapshot.oom_kill
    return OOM_KILLED if kill is not None and kill.verdict == CERTAIN else state_of(snapshot)
