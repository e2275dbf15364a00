"""Slow steps of ranks that reduce gradients in step: all have them, and one of them is why.

The others wait for it in their backward. Where a rank's slow steps grow in another phase, those that grow in backward
are such waits, and not worth a finding of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

RULE = "comp-step-jitter"
WAITING = "phase: backward"


class Seen(Protocol):
    """A finding, as far as it matters here."""

    @property
    def rule(self) -> str:
        """Its rule."""

    @property
    def where(self) -> str:
        """Its place."""


Finding = TypeVar("Finding", bound=Seen)
Whose = TypeVar("Whose")


def without_waits(found: Sequence[tuple[Finding, Whose]]) -> list[tuple[Finding, Whose]]:
    """The findings without the slow steps of ranks that waited in them for another rank of the run."""
    places = {finding.where for finding, _ in found if finding.rule == RULE}
    if not places - {WAITING, ""}:
        return list(found)
    return [(finding, whose) for finding, whose in found if (finding.rule, finding.where) != (RULE, WAITING)]
