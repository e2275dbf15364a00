"""Bytes as evidence texts say them. The advisor has its own; importing it would load the rulebook into the training."""

from __future__ import annotations

UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def size_text(number: float) -> str:
    """``2 GiB``, ``1.5 KiB``, ``12 B``: three digits, by powers of two."""
    for unit, scale in UNITS.items():
        if abs(number) >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"
