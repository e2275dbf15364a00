"""What a replay of the run's own allocations says, where a memory snapshot lies beside its record."""

from __future__ import annotations

import functools
from pathlib import Path

from gpuwatch.layout import SNAPSHOT_SUFFIX
from gpuwatch.reader import Snapshot

AT_ONCE_BYTES = 8 << 20
"""Larger snapshots take seconds to replay: the report says how to, and does not wait."""

REPLAYED = ("mem-oom", "frag-")
"""Rules whose advice a replay makes certain."""


def replay_evidence(snapshot: Snapshot, rule: str) -> str:
    """A sentence to add to the evidence of a rule on the allocator; empty where there is no snapshot to go by."""
    path = snapshot.path.with_suffix(SNAPSHOT_SUFFIX)
    if not rule.startswith(REPLAYED):
        return ""
    try:
        status = path.lstat()
    except OSError:
        return ""
    if status.st_size > AT_ONCE_BYTES:
        return f"`gpuwatch replay {path}` tells which setting would have helped"
    return _recommendation(path, status.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _recommendation(path: Path, modified: int) -> str:
    # Loaded where there is a snapshot: the daemon, which rarely meets one, does without 3 MB.
    from gpuwatch.allocator.document import compare
    from gpuwatch.allocator.parsing import read_snapshot
    from gpuwatch.allocator.reading import SnapshotError

    try:
        return f"replayed from its own allocations: {compare(read_snapshot(path))['recommended']['because']}"
    except (SnapshotError, OSError):
        return ""
