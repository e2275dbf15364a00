"""Slow steps and what they follow from: another rank's, or something else that is told of.

Of ranks that reduce gradients in step all have slow steps, and one of them is why. The others wait for it in their
backward. Where a rank's slow steps grow in another phase, those that grow in backward are such waits, and not worth a
finding of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

RULE = "comp-step-jitter"
WAITING = "phase: backward"
APART = ("forward", "optimizer", "other")
"""Phases in which nobody waits for a batch, nor for a rank that does."""


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


def follows(consequence: str, rule: str, slow: str | None) -> bool:
    """Whether what a rule explains follows from it: slow steps that grow in such a phase not from a slow loader."""
    return not (consequence == RULE and rule.startswith("data-") and slow in APART)


def without_waits(found: Sequence[tuple[Finding, Whose]]) -> list[tuple[Finding, Whose]]:
    """The findings without the slow steps of ranks that waited in them for another rank of the run."""
    places = {finding.where for finding, _ in found if finding.rule == RULE}
    if not places - {WAITING, ""}:
        return list(found)
    return [(finding, whose) for finding, whose in found if (finding.rule, finding.where) != (RULE, WAITING)]
