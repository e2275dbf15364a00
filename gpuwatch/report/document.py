"""A run as data: the JSON that ``gpuwatch report --json`` prints, and what every other rendering starts from.

Times are in seconds, sizes in bytes, shares between 0 and 1. What is not known is None, never 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from gpuwatch.advisor import Finding, advise_run, worth
from gpuwatch.catalog import (
    ALLOC_RETRIES,
    BATCHES,
    BETWEEN_SECONDS,
    DEVICE_ACTIVE_PEAK,
    DEVICE_ALLOCATED,
    DEVICE_CAPACITY,
    DEVICE_RESERVED,
    EPOCH_START_SECONDS,
    EPOCH_STARTS,
    EVALUATION_FORWARDS,
    EVALUATION_SECONDS,
    HOST_IN_USE,
    HOST_PEAK,
    HOST_RESIDENT,
    OOMS,
    PHASE_SECONDS,
    PHASES,
    RANK_EXIT_INFO,
    WINDOW_STEP_SECONDS,
)
from gpuwatch.expr import Metric, series_key
from gpuwatch.history import settled, window_gauges
from gpuwatch.lifecycle import STATES, last_seen, state_of
from gpuwatch.oomkill import CERTAIN, LIKELY
from gpuwatch.reader import Snapshot
from gpuwatch.report.data import data_of, worst
from gpuwatch.report.modules import modules_of, size_of
from gpuwatch.report.replayed import replay_evidence
from gpuwatch.report.shape import Document, MemoryPart, PhaseTime, RankPart, RunPart, TimePart
from gpuwatch.report.stopped import stopped_evidence

_KILLED = "gone without an end mark: killed, or crashed in native code"
_OUT_OF_MEMORY = {
    CERTAIN: "killed by the kernel: memory ran out",
    LIKELY: "likely killed by the kernel: memory ran out",
}
_EXCEPTION = "ended by an exception"
_QUANTILES = {"p50": "0.5", "p95": "0.95", "p99": "0.99"}


def document(snapshots: Sequence[Snapshot]) -> Document:
    """Everything known of one run, from one snapshot per rank (see :func:`gpuwatch.report.runs.find_run`)."""
    if not snapshots:
        raise ValueError("a run has at least one rank")
    return {
        "run": _run(snapshots),
        "time": _mean_time([time_of(snapshot) for snapshot in snapshots]),
        "memory": _largest_memory([memory_of(snapshot) for snapshot in snapshots]),
        "data": worst([data_of(snapshot) for snapshot in snapshots]),
        "findings": findings_of(snapshots),
    }


def cause_of(snapshot: Snapshot) -> str | None:
    """Why a rank ended, in words; None while it runs or when nothing is wrong."""
    for name, labels in snapshot.series:
        if name == RANK_EXIT_INFO.name and labels.get("cause"):
            return labels["cause"]
    kill = snapshot.oom_kill
    if kill is not None:
        return f"{_OUT_OF_MEMORY.get(kill.verdict, _KILLED)}; {kill.words}"
    return {"killed": _KILLED, "exception": _EXCEPTION}.get(state_of(snapshot))


def time_of(snapshot: Snapshot) -> TimePart:
    """Where a rank's time went. Steps per second leave out evaluation and the wait for an epoch's first batch."""
    spent = {phase: _value(snapshot, PHASE_SECONDS, phase=phase) for phase in PHASES}
    known = [seconds for seconds in spent.values() if seconds is not None]
    total = math.fsum(known) if known else None
    gauges = window_gauges(settled(snapshot.ring))
    quantiles = {name: series_key(WINDOW_STEP_SECONDS.name, {"quantile": text}) for name, text in _QUANTILES.items()}
    return {
        "steps": snapshot.step,
        "batches": _count(snapshot, BATCHES),
        "seconds": total,
        "steps_per_second": snapshot.step / total if total else None,
        "step_seconds": {name: gauges.get(key) for name, key in quantiles.items()},
        "phases": {phase: _share(seconds, total) for phase, seconds in spent.items()},
        "evaluation_seconds": _value(snapshot, EVALUATION_SECONDS),
        "evaluation_forwards": _count(snapshot, EVALUATION_FORWARDS),
        "epoch_start_seconds": _value(snapshot, EPOCH_START_SECONDS),
        "epoch_starts": _count(snapshot, EPOCH_STARTS),
        "between_seconds": _value(snapshot, BETWEEN_SECONDS),
    }


def memory_of(snapshot: Snapshot) -> MemoryPart:
    """A rank's memory."""
    return {
        "host_resident_bytes": _count(snapshot, HOST_RESIDENT),
        "host_peak_bytes": _count(snapshot, HOST_PEAK),
        "host_in_use_bytes": _count(snapshot, HOST_IN_USE),
        "device_allocated_bytes": _count(snapshot, DEVICE_ALLOCATED),
        "device_active_peak_bytes": _count(snapshot, DEVICE_ACTIVE_PEAK),
        "device_reserved_bytes": _count(snapshot, DEVICE_RESERVED),
        "device_capacity_bytes": _count(snapshot, DEVICE_CAPACITY),
        "alloc_retries": _count(snapshot, ALLOC_RETRIES),
        "ooms": _count(snapshot, OOMS),
        "modules": modules_of(snapshot) or None,
    }


def findings_of(snapshots: Sequence[Snapshot]) -> list[dict[str, object]]:
    """The findings, most valuable first. One that several ranks share is said once, with the rank it weighs most on."""
    found: dict[tuple[str, str], list[tuple[Finding, int]]] = {}
    for finding, rank_of in advise_run(snapshots):
        if rank_of is not None:
            told_by = (replay_evidence(rank_of, finding.rule), stopped_evidence(rank_of, finding.rule))
            finding = replace(finding, evidence="; ".join((finding.evidence, *filter(None, told_by))))
        for snapshot in snapshots if rank_of is None else [rank_of]:
            found.setdefault((finding.rule, finding.where), []).append((finding, snapshot.rank))
    heaviest = [max(shared, key=lambda pair: worth(pair[0])) for shared in found.values()]
    told = []
    for finding, rank in sorted(heaviest, key=lambda pair: worth(pair[0]), reverse=True):
        content = finding.as_dict()
        if len(snapshots) > 1:
            content["rank"] = rank
            content["ranks"] = [other for _, other in found[finding.rule, finding.where]]
        told.append(content)
    return told


def _run(snapshots: Sequence[Snapshot]) -> RunPart:
    first = snapshots[0]
    ranks = [_rank(snapshot) for snapshot in snapshots]
    # Of those in the most alarming state the first to go: the others went for it.
    gone = dict(zip((snapshot.rank for snapshot in snapshots), map(_last_seen, snapshots), strict=True))
    worst = min(ranks, key=lambda rank: (STATES.index(rank["state"]), gone[rank["rank"]]))
    cause = worst["cause"]
    ends = [snapshot.ended for snapshot in snapshots if snapshot.ended is not None]
    return {
        "name": first.run,
        "state": worst["state"],
        "cause": f"rank {worst['rank']}: {cause}" if cause and len(ranks) > 1 else cause,
        "started": _iso(min(snapshot.created for snapshot in snapshots)),
        "ended": _iso(max(ends)) if len(ends) == len(snapshots) else None,
        "run_seconds": max(snapshot.run_seconds for snapshot in snapshots),
        "steps": max(snapshot.step for snapshot in snapshots),
        "world_size": _whole(first.identity, "world_size"),
        "script": _text(first.identity, "script"),
        "python": _text(first.identity, "python"),
        "torch": _text(first.identity, "torch"),
        "device": _text(first.identity, "device"),
        "record": str(first.path),
        "ranks": ranks,
    }


def _last_seen(snapshot: Snapshot) -> float:
    return last_seen(snapshot) if snapshot.death is None else snapshot.death.at


def _rank(snapshot: Snapshot) -> RankPart:
    time, memory = time_of(snapshot), memory_of(snapshot)
    return {
        "rank": snapshot.rank,
        "state": state_of(snapshot),
        "cause": cause_of(snapshot),
        "pid": snapshot.pid,
        "steps": snapshot.step,
        "steps_per_second": time["steps_per_second"],
        "step_seconds": time["step_seconds"],
        "data_share": time["phases"]["data"]["share"],
        "host_peak_bytes": memory["host_peak_bytes"],
        "device_active_peak_bytes": memory["device_active_peak_bytes"],
        "record": str(snapshot.path),
    }


def _mean_time(times: Sequence[TimePart]) -> TimePart:
    if len(times) == 1:
        return times[0]
    steps = max(time["steps"] for time in times)
    spent = {phase: _mean([time["phases"][phase]["seconds"] for time in times]) for phase in PHASES}
    known = [seconds for seconds in spent.values() if seconds is not None]
    total = math.fsum(known) if known else None
    return {
        "steps": steps,
        "batches": _largest([time["batches"] for time in times]),
        "seconds": total,
        "steps_per_second": _mean([time["steps_per_second"] for time in times]),
        "step_seconds": {name: _longest([time["step_seconds"][name] for time in times]) for name in _QUANTILES},
        "phases": {phase: _share(seconds, total) for phase, seconds in spent.items()},
        "evaluation_seconds": _mean([time["evaluation_seconds"] for time in times]),
        "evaluation_forwards": _largest([time["evaluation_forwards"] for time in times]),
        "epoch_start_seconds": _mean([time["epoch_start_seconds"] for time in times]),
        "epoch_starts": _largest([time["epoch_starts"] for time in times]),
        "between_seconds": _mean([time["between_seconds"] for time in times]),
    }


def _largest_memory(memories: Sequence[MemoryPart]) -> MemoryPart:
    return {
        "host_resident_bytes": _largest([memory["host_resident_bytes"] for memory in memories]),
        "host_peak_bytes": _largest([memory["host_peak_bytes"] for memory in memories]),
        "host_in_use_bytes": _largest([memory["host_in_use_bytes"] for memory in memories]),
        "device_allocated_bytes": _largest([memory["device_allocated_bytes"] for memory in memories]),
        "device_active_peak_bytes": _largest([memory["device_active_peak_bytes"] for memory in memories]),
        "device_reserved_bytes": _largest([memory["device_reserved_bytes"] for memory in memories]),
        "device_capacity_bytes": _largest([memory["device_capacity_bytes"] for memory in memories]),
        "alloc_retries": _largest([memory["alloc_retries"] for memory in memories]),
        "ooms": _largest([memory["ooms"] for memory in memories]),
        "modules": max(
            (memory["modules"] for memory in memories if memory["modules"]),
            key=lambda modules: sum(map(size_of, modules)),
            default=None,
        ),
    }


def _value(snapshot: Snapshot, metric: Metric, **labels: str) -> float | None:
    number = snapshot.values.get(series_key(metric.name, labels))
    return number if number is not None and math.isfinite(number) else None


def _count(snapshot: Snapshot, metric: Metric) -> int | None:
    number = _value(snapshot, metric)
    return None if number is None else round(number)


def _share(seconds: float | None, total: float | None) -> PhaseTime:
    return {"seconds": seconds, "share": seconds / total if seconds is not None and total else None}


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return statistics.fmean(known) if known else None


def _longest(numbers: Sequence[float | None]) -> float | None:
    return max((number for number in numbers if number is not None), default=None)


def _largest(numbers: Sequence[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def _text(identity: Mapping[str, object], name: str) -> str | None:
    return None if identity.get(name) is None else str(identity[name])


def _whole(identity: Mapping[str, object], name: str) -> int | None:
    number = identity.get(name)
    return number if isinstance(number, int) else None
