"""How many files the daemon may have open at a time, and who may have how many of them.

Every connection is one, and so is every watched process: without a share for each, whoever opens many keeps the others
from being served.
"""

from __future__ import annotations

import contextlib
import resource

WANTED = 4096
"""A usual limit is 1,024, which a node of many ranks comes near, and may be raised by whoever has it."""


def allowed() -> int:
    """Raise the limit of this process as far as it may be, or as is wanted; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return WANTED if soft == resource.RLIM_INFINITY else soft


def for_connections(allowed: int) -> int:
    """Of so many, how many connections may be: answering one takes files too."""
    return max(1, allowed // 4 - 2)


def for_processes(allowed: int) -> int:
    """Of so many, how many may be processes that are watched."""
    return allowed // 2
