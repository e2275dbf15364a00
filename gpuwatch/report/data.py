"""A run's data path: the loader's setting against the recommended one, parts of a batch, a row for each worker."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gpuwatch.catalog import (
    BATCH_PINNED,
    LOADER_AFFORDABLE,
    LOADER_BATCH,
    LOADER_BATCH_BYTES,
    LOADER_BATCH_CPU_SECONDS,
    LOADER_BATCH_SECONDS,
    LOADER_BEST_PREFETCH,
    LOADER_BEST_WAIT,
    LOADER_BEST_WORKERS,
    LOADER_NEEDED_CORES,
    LOADER_PART_SECONDS,
    LOADER_PERSISTENT,
    LOADER_PREFETCH,
    LOADER_READY,
    LOADER_WORKERS,
    PADDING,
    SHARED_MEMORY_TOTAL,
    SHARED_MEMORY_USED,
    WORKER_COPIED,
    WORKER_DEATHS,
    WORKERS_IDLE,
)
from gpuwatch.expr import Metric, series_key
from gpuwatch.history import history_of
from gpuwatch.layout import WORKER_ROW
from gpuwatch.reader import Snapshot
from gpuwatch.report.shape import DataPart, WorkerPart
from gpuwatch.report.wording import counted, said
from gpuwatch.rulebook.waiting import WAIT_SHARE

PARTS = ("items", "collate", "transfer", "pin", "copy", "sampler")
_QUANTILES = {"p10": "0.1", "p50": "0.5", "p90": "0.9", "p99": "0.99"}
HEADINGS = ("worker", "batches", "busy", "no core", "runs", "blocked", "resident", "unique", "starts")
"""``busy`` and ``no core`` are shares of a worker's time, ``runs`` and ``blocked`` of the time it makes batches."""


def data_of(snapshot: Snapshot) -> DataPart:
    """What is known of a rank's data path."""
    history = history_of(snapshot)

    def number(metric: Metric) -> float | None:
        value = metric.value(history)
        return value if value is not None and math.isfinite(value) else None

    def whole(metric: Metric) -> int | None:
        value = number(metric)
        return None if value is None else round(value)

    return {
        "wait_share": WAIT_SHARE.value(history),
        "workers": whole(LOADER_WORKERS),
        "prefetch": whole(LOADER_PREFETCH),
        "persistent_workers": _flag(number(LOADER_PERSISTENT)),
        "recommended_workers": whole(LOADER_BEST_WORKERS),
        "recommended_prefetch": whole(LOADER_BEST_PREFETCH),
        "recommended_wait_share": number(LOADER_BEST_WAIT),
        "needed_cores": number(LOADER_NEEDED_CORES),
        "affordable_batch_seconds": number(LOADER_AFFORDABLE),
        "ready_share": number(LOADER_READY),
        "batch_items": number(LOADER_BATCH),
        "batch_bytes": whole(LOADER_BATCH_BYTES),
        "batch_seconds": {name: number(LOADER_BATCH_SECONDS.where(quantile=text)) for name, text in _QUANTILES.items()},
        "batch_cpu_seconds": number(LOADER_BATCH_CPU_SECONDS),
        "parts_seconds": {part: number(LOADER_PART_SECONDS.where(part=part)) for part in PARTS},
        "pinned": _flag(number(BATCH_PINNED)),
        "padding_share": number(PADDING),
        "worker_deaths": whole(WORKER_DEATHS),
        "idle_workers": whole(WORKERS_IDLE),
        "copied_bytes": whole(WORKER_COPIED),
        "shared_memory_used_bytes": whole(SHARED_MEMORY_USED),
        "shared_memory_total_bytes": whole(SHARED_MEMORY_TOTAL),
        "worker_table": workers_of(snapshot),
    }


def worst(parts: Sequence[DataPart]) -> DataPart:
    """Of several ranks the one that waits most for its data."""
    return max(parts, key=lambda part: (part["wait_share"] or 0.0, part["workers"] is not None))


def workers_of(snapshot: Snapshot) -> list[WorkerPart]:
    """A row for each worker of the training loader, in their order; empty where there is none."""
    rows: dict[int, dict[str, float]] = {}
    for name, labels in snapshot.series:
        if name == WORKER_ROW and labels.keys() == {"worker", "part"} and labels["worker"].isdecimal():
            number = snapshot.values.get(series_key(name, labels))
            if number is not None and number >= 0 and math.isfinite(number):
                rows.setdefault(int(labels["worker"]), {})[labels["part"]] = number
    return [_worker(worker, rows[worker]) for worker in sorted(rows)]


def _worker(worker: int, row: Mapping[str, float]) -> WorkerPart:
    def whole(part: str) -> int | None:
        return round(row[part]) if part in row else None

    return {
        "worker": worker,
        "batches": whole("batches"),
        "busy_share": row.get("busy"),
        "core_wait_share": row.get("core_wait"),
        "cpu_share": row.get("cpu"),
        "blocked_share": row.get("blocked"),
        "resident_bytes": whole("resident"),
        "unique_bytes": whole("unique"),
        "starts": whole("starts"),
    }


def _flag(number: float | None) -> bool | None:
    return None if number is None else bool(number)


def data_lines(data: DataPart) -> list[str]:
    """The data path in a few lines, each of what is known; empty when nothing is."""
    found = (_setting(data), _batch(data), _state(data), _shared(data))
    return [line for line in found if line]


def lines(parts: Sequence[WorkerPart]) -> list[tuple[str, ...]]:
    """The table of workers as text; what is not known is left blank."""
    return [
        (
            str(part["worker"]),
            _cell(part["batches"], "count"),
            _cell(part["busy_share"], "ratio"),
            _cell(part["core_wait_share"], "ratio"),
            _cell(part["cpu_share"], "ratio"),
            _cell(part["blocked_share"], "ratio"),
            _cell(part["resident_bytes"], "bytes"),
            _cell(part["unique_bytes"], "bytes"),
            _cell(part["starts"], "count"),
        )
        for part in parts
    ]


def _cell(number: float | None, unit: str) -> str:
    return "" if number is None else said(number, unit)


def _setting(data: DataPart) -> str:
    if data["workers"] is None:
        return ""
    line = counted(data["workers"], "worker") if data["workers"] else "no workers"
    if data["workers"] and data["prefetch"] is not None:
        line += f", prefetch factor {data['prefetch']}"
    if data["recommended_workers"] is not None:
        line += f"; recommended {data['recommended_workers']}"
        if data["recommended_wait_share"] is not None:
            line += f", and {said(data['recommended_wait_share'], 'ratio')} of step time would be spent waiting"
    return line


def _batch(data: DataPart) -> str:
    parts = [
        ("made in", data["batch_seconds"]["p50"]),
        *((part, data["parts_seconds"][part]) for part in PARTS),
        ("CPU", data["batch_cpu_seconds"]),
    ]
    known = [f"{name} {said(seconds, 'seconds')}" for name, seconds in parts if seconds is not None]
    size = [
        text
        for text, number in (
            (f"of {said(data['batch_items'], 'count')} items", data["batch_items"]),
            (said(data["batch_bytes"], "bytes"), data["batch_bytes"]),
        )
        if number is not None
    ]
    return f"a batch {', '.join([*size, *known])}" if known or size else ""


def _state(data: DataPart) -> str:
    known = []
    if data["ready_share"] is not None:
        known.append(f"{said(data['ready_share'], 'ratio')} of batches were ready when asked for")
    if data["padding_share"] is not None:
        known.append(f"{said(data['padding_share'], 'ratio')} padding")
    if data["pinned"] is not None:
        known.append("pinned" if data["pinned"] else "not pinned")
    if data["worker_deaths"]:
        known.append(f"{counted(data['worker_deaths'], 'worker')} died")
    if data["idle_workers"]:
        known.append(f"{counted(data['idle_workers'], 'worker')} of loaders that nobody uses")
    if data["copied_bytes"]:
        known.append(f"{said(data['copied_bytes'], 'bytes')} of the data set copied by workers")
    return ", ".join(known)


def _shared(data: DataPart) -> str:
    used, total = data["shared_memory_used_bytes"], data["shared_memory_total_bytes"]
    if not data["workers"] or used is None or total is None:
        return ""
    return f"/dev/shm {said(used, 'bytes')} of {said(total, 'bytes')} in use"
