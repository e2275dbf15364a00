"""Flight records as a training process writes them, for tests of what reads them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuwatch.catalog import (
    BATCHES,
    BETWEEN_SECONDS,
    CPU_BUDGET,
    EPOCH_START_SECONDS,
    EPOCH_STARTS,
    EVALUATION_FORWARDS,
    EVALUATION_SECONDS,
    GC_PAUSE_SECONDS,
    GC_PAUSES,
    HOST_IN_USE,
    HOST_PEAK,
    HOST_RESIDENT,
    LOADER_WORKERS,
    PHASE_SECONDS,
)
from gpuwatch.layout import Column, State, Word
from gpuwatch.record import RecordWriter

NAN = float("nan")
PHASE_COLUMNS = {
    "data": Column.DATA,
    "forward": Column.FORWARD,
    "backward": Column.BACKWARD,
    "optimizer": Column.OPTIMIZER,
}
USUAL_STEP = {"data": 0.030, "forward": 0.020, "backward": 0.040, "optimizer": 0.005, "other": 0.005}
"""Seconds of a step by phase; 30 % of it is data wait."""


def row(number: int, end: float, step: Mapping[str, float] = USUAL_STEP, **columns: float) -> tuple[float, ...]:
    """A row of the ring for a step that spends these seconds in these phases."""
    cells = [NAN] * len(Column)
    cells[Column.END], cells[Column.NUMBER] = end, number
    cells[Column.TOTAL] = sum(step.values())
    for phase, column in PHASE_COLUMNS.items():
        cells[column] = step.get(phase, NAN)
    cells[Column.EPOCH_START] = cells[Column.GC] = cells[Column.TAGS] = 0.0
    cells[Column.ELEMENTS] = 1024
    for name, cell in columns.items():
        cells[Column[name]] = cell
    return tuple(cells)


def rows(count: int, step: Mapping[str, float] = USUAL_STEP) -> list[tuple[float, ...]]:
    """The ring of a run of equal steps."""
    total = sum(step.values())
    return [row(number, number * total, step) for number in range(1, count + 1)]


def write_run(
    directory: Path,
    name: str = "train",
    rank: int = 0,
    world_size: int = 1,
    steps: int = 200,
    step: Mapping[str, float] = USUAL_STEP,
    state: State | None = State.CLEAN,
    observations: Sequence[tuple[str, str, str, float]] = (),
    values: Mapping[str, float] | None = None,
    identity: Mapping[str, object] | None = None,
) -> RecordWriter:
    """A record of equal steps; ``state`` None leaves it open (the run goes on). ``values`` are further gauges."""
    known = {"run": name, "rank": rank, "world_size": world_size, "script": "train.py", "torch": "2.13.0+cpu"}
    writer = RecordWriter(directory, {**known, "python": "3.11.2", "device": "cpu", **(identity or {})})
    seconds = {phase: spent * steps for phase, spent in step.items()}
    for phase, spent in seconds.items():
        writer.values[writer.counter(PHASE_SECONDS.name, phase=phase)] = spent
    gauges = {
        BATCHES.name: steps,
        EVALUATION_SECONDS.name: 1.5,
        EVALUATION_FORWARDS.name: 12,
        EPOCH_STARTS.name: 1,
        EPOCH_START_SECONDS.name: 0.2,
        BETWEEN_SECONDS.name: 0.3,
        GC_PAUSES.name: 0,
        GC_PAUSE_SECONDS.name: 0.0,
        LOADER_WORKERS.name: 0,
        CPU_BUDGET.name: 2,
        HOST_RESIDENT.name: 400 << 20,
        HOST_PEAK.name: 512 << 20,
        HOST_IN_USE.name: 128 << 20,
        **(values or {}),
    }
    for gauge, number in gauges.items():
        writer.values[writer.series(gauge)] = number
    for cells in rows(steps, step):
        writer.step_row(*cells)
    for observation in observations:
        writer.observe(*observation)
    now = time.monotonic_ns()
    writer.words[Word.STEP], writer.words[Word.STEP_TIME] = steps, now
    writer.words[Word.HEARTBEAT] = writer.words[Word.ATTACHED] + int(sum(seconds.values()) * 1e9)
    if state is not None:
        writer.close(state)
    return writer
