"""Mean and median, as the statistics module has them: with what that imports (decimals, fractions) it takes 0.5 MB of
the daemon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def mean(numbers: Iterable[float]) -> float:
    """The arithmetic mean; there must be one number at least."""
    known = list(numbers)
    return math.fsum(known) / len(known)


def median(numbers: Iterable[float]) -> float:
    """The number in the middle, or halfway between the two there; there must be one number at least."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
