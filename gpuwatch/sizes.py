"""Bytes and times as evidence texts say them. The advisor has its own; importing it would load the rulebook."""

from __future__ import annotations

UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}

_TIMES = {"days": 86400.0, "h": 3600.0, "min": 60.0}


def size_text(number: float) -> str:
    """``2 GiB``, ``1.5 KiB``, ``12 B``: three digits, by powers of two."""
    for unit, scale in UNITS.items():
        if abs(number) >= scale:
            units = number / scale
            return f"{units:.0f} {unit}" if abs(units) >= 999.5 else f"{units:.3g} {unit}"
    return f"{number:.0f} B"


def time_text(seconds: float) -> str:
    """``2.5 days``, ``1.3 h``, ``40 min``, ``12 s``."""
    for unit, scale in _TIMES.items():
        if seconds >= scale:
            return f"{seconds / scale:,.2g} {unit}" if seconds < 100 * scale else f"{seconds / scale:,.0f} {unit}"
    return f"{seconds:.0f} s"
