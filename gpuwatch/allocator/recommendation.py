"""One piece of advice from the outcomes under several settings, with the figures that it rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuwatch.allocator.settings import Settings, conf_of, parse
from gpuwatch.allocator.whatif import Outcome

WORTH_A_CHANGE = 0.02
"""A setting that would have reserved less by a smaller share is not recommended: another step may cost as much."""

AS_GOOD = 0.01
"""Of two settings this close in what they reserve, the one named first is recommended."""

DEFAULT_CANDIDATES = (
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:256",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "large_segment_size_mb:64",
)
"""Tried when none is given, the one with the fewest side effects first."""


@dataclass(frozen=True)
class Advice:
    """What to set, or that nothing helps. Sizes in bytes."""

    conf: str | None
    because: str
    peak_reserved: int
    instead_of: int
    """What the recorded settings would have reserved from the same start."""


def candidates(recorded: Settings, texts: Sequence[str]) -> list[tuple[str, Settings]]:
    """The settings to try: those given, or the default ones that are not the recorded ones. Raises SettingsError."""
    if texts:
        return [(text, parse(text)) for text in texts]
    found = []
    for text in DEFAULT_CANDIDATES:
        settings = parse(text, recorded)
        mixed = settings.expandable_segments and settings.max_split_size != recorded.max_split_size
        if settings != recorded and not mixed:
            found.append((conf_of(settings), settings))
    return found


def recommend(
    baseline: Outcome, tried: Sequence[tuple[str, Outcome]], capacity: int | None, said: Callable[[int], str]
) -> Advice:
    """The setting that would have reserved the least, where that is worth a change."""
    reserved, active = baseline.peak_reserved, baseline.peak_active
    fitting = [(conf, outcome) for conf, outcome in tried if outcome.out_of_memory is None]
    best: tuple[str, Outcome] | None = None
    for conf, outcome in fitting:
        if best is None or outcome.peak_reserved < best[1].peak_reserved * (1 - AS_GOOD):
            best = (conf, outcome)
    rescued = baseline.out_of_memory is not None and best is not None
    if best is not None and (rescued or best[1].peak_reserved <= reserved * (1 - WORTH_A_CHANGE)):
        conf, outcome = best
        if rescued and capacity is not None:
            because = f"{conf} would have fitted into {said(capacity)}, where the recorded settings run out of memory"
        else:
            because = f"{conf} would have reserved {said(outcome.peak_reserved)} instead of {said(reserved)}"
        return Advice(conf, because, outcome.peak_reserved, reserved)
    if capacity is not None and active > capacity:
        because = f"no setting helps: the live bytes themselves peak at {said(active)}, above {said(capacity)}"
    elif capacity is not None and baseline.out_of_memory is not None:
        because = (
            f"no setting helps: none of those tried fits into {said(capacity)}; "
            f"the live bytes themselves peak at {said(active)}"
        )
    else:
        because = f"no setting helps: the live bytes themselves peak at {said(active)} of {said(reserved)} reserved"
    return Advice(None, f"{because}; see the owners (gpuwatch snapshot)", reserved, reserved)
