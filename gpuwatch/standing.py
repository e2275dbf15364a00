"""How far a rank is, in steps and parts of one: of ranks that wait for each other, who is behind the others?

A rank among several writes down at every step what it last did (:class:`gpuwatch.layout.Place`). Where that does not
tell two silent ranks apart (both have their batch, and the one waits in a collective of its forward for the other), the
kernel may: who sleeps, or was stopped, waits for nobody.
"""

from __future__ import annotations

from gpuwatch.layout import BACKWARD_BITS, PLACE_BITS, State
from gpuwatch.mainthread import not_waiting
from gpuwatch.reader import Snapshot

SILENT_SECONDS = 60.0
"""Without progress for so long, a rank is asked after at the kernel."""

_CODES = 1 << PLACE_BITS
_WAITS = 0.01
"""Of a step: what a silent rank is ahead of one that is where it is, but does not wait."""

_DONE = 0.02
"""The same for a rank that has ended: ahead of all that had the same steps and no more, behind the others."""


def standing(snapshot: Snapshot) -> float | None:
    """How many steps a rank is through; None for one that is gone without an end mark."""
    if not snapshot.up:
        return snapshot.step + _DONE if snapshot.state >= State.CLEAN else None
    steps, within = divmod(snapshot.place, 1 << (PLACE_BITS + BACKWARD_BITS))
    # A step is counted a moment before its place is known; a record may be anybody's.
    parts = within / _CODES if steps == snapshot.step else 0.0
    far = snapshot.step + parts / (1 + parts)
    waits = snapshot.progress_age >= SILENT_SECONDS and _among_others(snapshot) and not not_waiting(snapshot)
    return far + _WAITS if waits else far


def _among_others(snapshot: Snapshot) -> bool:
    return snapshot.identity.get("world_size", 1) != 1
