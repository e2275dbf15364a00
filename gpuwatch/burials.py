"""Post-mortems of the ranks of a directory that are gone without an end mark."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpuwatch import aside
from gpuwatch.death import Death
from gpuwatch.layout import POST_MORTEMS
from gpuwatch.oomkill import written_down
from gpuwatch.reader import Snapshot

AGAIN_SECONDS = 60.0
"""After a post-mortem that could not be written, on a full disk for one."""

POST_MORTEM = "gpuwatch.postmortem"


class Burials:
    """Has one post-mortem written of each rank, by another process. For one thread.

    ``death_of`` tells how the process of a record ended, ``say`` writes a line into the log.
    """

    def __init__(self, directory: Path, death_of: Callable[[Path], Death | None], say: Callable[[str], None]) -> None:
        self._directory = directory
        self._death_of = death_of
        self._say = say
        self._held: set[Path] = set()
        self._complaints: set[str] = set()
        self._again = -math.inf
        with contextlib.suppress(OSError):  # said when it is needed
            (directory / POST_MORTEMS).mkdir(mode=0o700, exist_ok=True)  # now: later it may be another user's

    def hold(self, dead: Sequence[Snapshot]) -> None:
        """Bury those that are not buried yet; a user's together: a record that fails is nobody else's trouble."""
        if time.monotonic() < self._again:
            return
        self._held &= {snapshot.path for snapshot in dead}
        users: dict[int, list[Path]] = defaultdict(list)
        for snapshot in dead:
            if snapshot.path in self._held:
                continue
            if written_down(snapshot.path, snapshot.uid) is not None:
                self._held.add(snapshot.path)  # by an earlier daemon
            else:
                users[snapshot.uid].append(snapshot.path)
        for records in users.values():
            self._bury(records)

    def _bury(self, records: Sequence[Path]) -> None:
        deaths = [self._death_of(record) for record in records]
        told = [(str(record), death and death.as_dict()) for record, death in zip(records, deaths, strict=True)]
        self._held |= set(records)
        try:
            answers = aside.ask(POST_MORTEM, [str(self._directory)], told).splitlines()
        except aside.NotStarted as error:
            self._fail(f"cannot write post-mortems: {error}", records)
        except aside.AsideError as error:
            self._fail(f"cannot write the post-mortem of {records[0].name} and {len(records) - 1} more: {error}", ())
        else:
            for record, answer in zip(records, map(json.loads, answers), strict=False):
                self._told(record, answer)

    def _told(self, record: Path, answer: Mapping[str, str]) -> None:
        if "said" in answer:
            self._say(answer["said"])
        if "failed" in answer:
            self._fail(answer["failed"], [record])

    def _fail(self, complaint: str, again: Sequence[Path]) -> None:
        """Say it once; ``again`` are tried again later."""
        if complaint not in self._complaints:
            self._complaints.add(complaint)
            self._say(complaint)
        self._held -= set(again)
        self._again = time.monotonic() + AGAIN_SECONDS
