"""Two runs side by side, as data: the JSON of ``gpuwatch compare --json``.

The first run is what the second is measured by. A change is said to be one only where the records show it: the ratio
of two median step times comes with an interval (see :mod:`gpuwatch.report.bootstrap`) and is a regression when the
whole interval lies above 1 and the ratio itself beyond the limit of the rule perf-regression.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypedDict

from gpuwatch.advisor import spoken
from gpuwatch.catalog import CPU_BUDGET, LOADER_BATCH, LOADER_PREFETCH, LOADER_WORKERS, PHASES
from gpuwatch.history import FEWEST_STEPS, phase_sums, settled
from gpuwatch.layout import Column
from gpuwatch.limits import REGRESSION_MEMORY_RATIO, REGRESSION_STEP_RATIO, REGRESSION_WAIT_POINTS
from gpuwatch.reader import Snapshot
from gpuwatch.report import bootstrap
from gpuwatch.report.document import document
from gpuwatch.report.judgeable import bad_end, the_same, too_short
from gpuwatch.report.shape import Document

FASTER, SLOWER, SAME, UNKNOWN = "faster", "slower", "no difference", "not known"

_SETTINGS = {
    "loader workers": LOADER_WORKERS.name,
    "prefetched batches": LOADER_PREFETCH.name,
    "items of a batch": LOADER_BATCH.name,
    "usable cores": CPU_BUDGET.name,
}


class Pair(TypedDict):
    """A number in the first run and in the second."""

    before: float | None
    after: float | None


class StepChange(TypedDict):
    """Median step time in seconds, the ratio second over first with its 95 % interval, and what that comes to."""

    before: float | None
    after: float | None
    ratio: float | None
    interval: list[float] | None
    verdict: str


class Setting(TypedDict):
    """What the runs were set up with, where it differs."""

    name: str
    before: str | None
    after: str | None


class Named(TypedDict):
    """A finding in short."""

    rule: str
    severity: str
    summary: str
    where: str


class Findings(TypedDict):
    """Findings of the second run that the first had not, the other way round, and of both."""

    new: list[Named]
    gone: list[Named]
    kept: list[Named]


class Comparison(TypedDict):
    """Two runs side by side. ``regressions`` are sentences; none when nothing got worse beyond the limits.

    ``not_compared`` says what could not be judged, and why; ``same_run`` that there is nothing to judge.
    """

    before: str
    after: str
    step_seconds: StepChange
    phase_seconds: dict[str, Pair]
    wait_share: Pair
    host_peak_bytes: Pair
    device_peak_bytes: Pair
    settings: list[Setting]
    findings: Findings
    regressions: list[str]
    not_compared: list[str]
    same_run: bool


def compare(before: Sequence[Snapshot], after: Sequence[Snapshot]) -> Comparison:
    """Compare two runs, one snapshot per rank each."""
    first, second = document(before), document(after)
    rows_before, rows_after = _rows(before), _rows(after)
    phases_before, phases_after = _phases(rows_before), _phases(rows_after)
    comparison: Comparison = {
        "before": first["run"]["name"],
        "after": second["run"]["name"],
        "step_seconds": _step_change(rows_before, rows_after),
        "phase_seconds": {
            phase: {"before": phases_before.get(phase), "after": phases_after.get(phase)} for phase in PHASES
        },
        "wait_share": {"before": _wait_share(phases_before), "after": _wait_share(phases_after)},
        "host_peak_bytes": _peaks(first, second, "host_peak_bytes"),
        "device_peak_bytes": _peaks(first, second, "device_active_peak_bytes"),
        "settings": _settings(before[0], after[0]),
        "findings": _findings(first, second),
        "regressions": [],
        "not_compared": too_short((first, second), (_most(before), _most(after))),
        "same_run": the_same(first, second),
    }
    comparison["regressions"] = [*bad_end(first, second), *_regressions(comparison)]
    return comparison


def _rows(snapshots: Sequence[Snapshot]) -> list[tuple[float, ...]]:
    """The settled steps of the slowest rank: the others wait for it."""
    known = [rows for snapshot in snapshots if len(rows := settled(snapshot.ring)) >= FEWEST_STEPS]
    return max(known, key=lambda rows: statistics.median(row[Column.TOTAL] for row in rows), default=[])


def _most(snapshots: Sequence[Snapshot]) -> int:
    """Settled steps of the rank that has most of them."""
    return max(len(settled(snapshot.ring)) for snapshot in snapshots)


def _phases(rows: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Seconds of a step by phase, mean over these steps."""
    return {phase: seconds / len(rows) for phase, seconds in phase_sums(rows).items()} if rows else {}


def _wait_share(phases: dict[str, float]) -> float | None:
    total = sum(phases.values())
    return phases["data"] / total if total > 0 else None


def _step_change(before: Sequence[tuple[float, ...]], after: Sequence[tuple[float, ...]]) -> StepChange:
    totals_before = [row[Column.TOTAL] for row in before]
    totals_after = [row[Column.TOTAL] for row in after]
    ratio = bootstrap.median_ratio(totals_before, totals_after)
    verdict = UNKNOWN
    if ratio is not None:
        verdict = SLOWER if ratio.low > 1 else FASTER if ratio.high < 1 else SAME
    return {
        "before": statistics.median(totals_before) if totals_before else None,
        "after": statistics.median(totals_after) if totals_after else None,
        "ratio": None if ratio is None else ratio.value,
        "interval": None if ratio is None else [ratio.low, ratio.high],
        "verdict": verdict,
    }


def _peaks(first: Document, second: Document, name: str) -> Pair:
    def peak(report: Document) -> float | None:
        size = report["memory"].get(name)
        return float(size) if isinstance(size, (int, float)) else None

    return {"before": peak(first), "after": peak(second)}


def _settings(before: Snapshot, after: Snapshot) -> list[Setting]:
    names: dict[str, Callable[[Snapshot], object]] = {
        name: (lambda snapshot, key=key: snapshot.identity.get(key))  # type: ignore[misc]
        for name, key in (("script", "script"), ("torch", "torch"), ("Python", "python"), ("device", "device"))
    }
    names["ranks"] = lambda snapshot: snapshot.identity.get("world_size")
    for name, key in _SETTINGS.items():
        names[name] = lambda snapshot, key=key: _number(snapshot.values.get(key))  # type: ignore[misc]
    changed: list[Setting] = []
    for name, reading in names.items():
        one, other = reading(before), reading(after)
        if one != other:
            changed.append({"name": name, "before": _text(one), "after": _text(other)})
    return changed


def _number(number: float | None) -> str | None:
    return None if number is None else f"{number:g}"


def _text(item: object) -> str | None:
    return None if item is None else str(item)


def _findings(first: Document, second: Document) -> Findings:
    before, after = _named(first), _named(second)
    return {
        "new": [finding for key, finding in after.items() if key not in before],
        "gone": [finding for key, finding in before.items() if key not in after],
        "kept": [finding for key, finding in after.items() if key in before],
    }


def _named(report: Document) -> dict[str, Named]:
    """Findings by rule: a place moves with every edit of the script, and is still the same fault."""
    return {
        str(finding["rule"]): {
            "rule": str(finding["rule"]),
            "severity": str(finding["severity"]),
            "summary": str(finding["summary"]),
            "where": str(finding["where"] or ""),
        }
        for finding in reversed(report["findings"])
    }


def _regressions(comparison: Comparison) -> list[str]:
    found = []
    step = comparison["step_seconds"]
    if step["verdict"] == SLOWER and step["ratio"] is not None and step["ratio"] >= REGRESSION_STEP_RATIO:
        now, then = spoken(step["after"] or 0, "seconds"), spoken(step["before"] or 0, "seconds")
        found.append(f"a step takes {now} instead of {then}: {step['ratio']:.2f} times{_grown(comparison)}")
    for name, pair in (("device", comparison["device_peak_bytes"]), ("host", comparison["host_peak_bytes"])):
        before, after = pair["before"], pair["after"]
        if before and after and after / before >= REGRESSION_MEMORY_RATIO:
            found.append(
                f"{name} memory peaks at {spoken(after, 'bytes')} instead of {spoken(before, 'bytes')}: "
                f"{after / before:.2f} times"
            )
    share, wait = comparison["wait_share"], comparison["phase_seconds"]["data"]
    if _grew(share, REGRESSION_WAIT_POINTS) and (wait["after"] or 0) >= (wait["before"] or 0) * REGRESSION_STEP_RATIO:
        # The share alone also grows when everything else got faster.
        now, then = spoken(share["after"] or 0, "ratio"), spoken(share["before"] or 0, "ratio")
        found.append(f"{now} of step time waits for data instead of {then}")
    return found


def _grew(pair: Pair, points: float) -> bool:
    before, after = pair["before"], pair["after"]
    return before is not None and after is not None and after - before >= points


def _grown(comparison: Comparison) -> str:
    """The phase that makes a step slower, as the end of a sentence."""
    growth = {
        phase: pair["after"] - pair["before"]
        for phase, pair in comparison["phase_seconds"].items()
        if pair["before"] is not None and pair["after"] is not None
    }
    if not growth:
        return ""
    phase = max(growth, key=lambda name: growth[name])
    return f", most of it in {phase} (+{spoken(growth[phase], 'seconds')})" if growth[phase] > 0 else ""
