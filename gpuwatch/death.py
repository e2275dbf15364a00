"""When the process of a rank ended, and how, as the daemon saw it and wrote it into the rank's post-mortem."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuwatch.oomkill import written_down

KEY = "death"
"""Where a post-mortem has it."""


@dataclass(frozen=True)
class Death:
    """The end of a process: Unix time, and its wait status where the kernel tells strangers (Linux 6.15)."""

    at: float
    status: int | None = None

    @property
    def words(self) -> str:
        """How it ended, as evidence; empty where that is not known."""
        if self.status is None:
            return ""
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            known = {each.value: each.name for each in signal.Signals}
            return f"it was ended by {known.get(number, f'signal {number}')}"
        return f"it ended itself with exit status {os.WEXITSTATUS(self.status)}"

    def as_dict(self) -> dict[str, object]:
        """As a post-mortem has it."""
        return asdict(self)


def death_of(record: Path, uid: int) -> Death | None:
    """What the daemon wrote down of the end of a record's process; None where it did not see it."""
    found = (written_down(record, uid) or {}).get(KEY)
    if not isinstance(found, Mapping):
        return None
    at, status = found.get("at"), found.get("status")
    if not isinstance(at, (int, float)) or not math.isfinite(at) or not 0 <= at < 1e12:
        return None
    return Death(float(at), status if isinstance(status, int) and 0 <= status < 1 << 16 else None)
