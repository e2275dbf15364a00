"""What can be said of two runs side by side at all: which of them are too short, and which did not end well."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.history import FEWEST_STEPS, WARM_UP_STEPS
from gpuwatch.report.shape import Document

BAD_ENDS = ("killed", "exception")


def too_short(reports: Sequence[Document], steps: Sequence[int]) -> list[str]:
    """A sentence for each run with too few steps to compare; ``steps`` are those that count, warm-up left out."""
    found = []
    for report, count in zip(reports, steps, strict=True):
        if count < FEWEST_STEPS:
            run = report["run"]
            found.append(
                f"step time: {run['name']} has {run['steps']} step{'s' * (run['steps'] != 1)}, {count} of which count; "
                f"{FEWEST_STEPS} are needed, after {WARM_UP_STEPS} to warm up"
            )
    return list(dict.fromkeys(found))


def bad_end(before: Document, after: Document) -> list[str]:
    """That the second run broke off, where the first one did not."""
    run = after["run"]
    if run["state"] not in BAD_ENDS or before["run"]["state"] in BAD_ENDS:
        return []
    return [f"it broke off after {run['steps']} steps: {run['cause'] or run['state']}"]


def the_same(before: Document, after: Document) -> bool:
    """Whether both are one run."""
    return before["run"]["record"] == after["run"]["record"]
