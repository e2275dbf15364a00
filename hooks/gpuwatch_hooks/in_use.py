"""Bytes that the C allocator has handed out (glibc's ``mallinfo2``), asked for as often as the answer is cheap.

The call walks the allocator's lists of free blocks: ten microseconds in a small program, milliseconds where a leak or a
long life has left tens of thousands of blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from gpuwatch.interruption import expected

SHARE = 0.001
"""Share of the run's time that these calls may take, beyond :data:`AT_FIRST`."""

AT_FIRST = 50_000_000
"""Nanoseconds they may take however short the run is: a leak shall be told within its first hundred steps."""

_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class InUse:
    """Reads the bytes in use, within what that may cost a run that begins now."""

    def __init__(self) -> None:
        self._began = monotonic_ns()
        self._spent = 0

    def read(self) -> int | None:
        """The bytes; None where the allocator does not tell, or where asking again so soon would cost too much."""
        before = monotonic_ns()
        if self._spent > AT_FIRST + SHARE * (before - self._began):
            return None
        used = bytes_in_use()
        self._spent += monotonic_ns() - before
        return used


def bytes_in_use() -> int | None:
    """The bytes, whatever that costs; None where the allocator does not tell."""
    if _ASK is None:
        return None
    information = _ASK()
    return int(information.uordblks + information.hblkhd)


def _mallinfo2() -> Callable[[], Any] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2  # glibc >= 2.33
    except expected(OSError, AttributeError):
        return None
    function.restype = _MallInfo
    function.argtypes = []
    return function


_ASK = _mallinfo2()
