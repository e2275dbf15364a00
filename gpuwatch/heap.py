"""Memory that the C library keeps for later, given back: a daemon on every node has none to keep.

Only glibc has both calls; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8


def share_one_arena() -> None:
    """Let all threads allocate from one arena. Every request has a thread of its own, and would start another one."""
    _call("mallopt", _M_ARENA_MAX, 1)


def give_back() -> None:
    """Return free memory to the system: what start-up and the last pages took. Takes under a millisecond."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)
