"""The recent readings of one GPU as numbers: as objects, five minutes of eight GPUs would be 6 MB."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Mapping
from itertools import repeat
from typing import Any

from gpuwatch.expr import History, Metric, series_key
from gpuwatch.gpuseries import gpu_series
from gpuwatch.nvml import GpuReading

KEPT_SAMPLES = 300
DROPPED_SAMPLES = 60
"""Kept beyond that, and dropped together."""

MOST_COLUMNS = 128

FEWEST_SAMPLES = 10
"""Samples below which nothing is judged: a moment is no finding."""


class Past:
    """Times of the samples, and a column of numbers for each series: a single number as long as it never changed."""

    def __init__(self) -> None:
        self._times = array("d")
        self._columns: dict[str, array[float] | float] = {}

    def add(self, taken: float, reading: GpuReading) -> None:
        """Append a reading; the oldest go once there are too many."""
        before = len(self._times)
        self._times.append(taken)
        now = {_key(metric, labels): number for metric, labels, number in gpu_series(reading)}
        for key, column in self._columns.items():
            number = now.pop(key, math.nan)
            if number != column:
                if isinstance(column, float):
                    column = self._columns[key] = array("d", [column]) * before
                column.append(number)
        for key, number in now.items():
            if len(self._columns) < MOST_COLUMNS:
                self._columns[key] = number if not before else array("d", [*[math.nan] * before, number])
        if len(self._times) >= KEPT_SAMPLES + DROPPED_SAMPLES:
            for series in (self._times, *self._columns.values()):
                if not isinstance(series, float):
                    del series[:DROPPED_SAMPLES]

    def history(self) -> History:
        """What the rules read; empty before there are enough samples."""
        if len(self._times) < FEWEST_SAMPLES:
            return {}
        known = {}
        for key, column in self._columns.items():
            numbers = repeat(column, len(self._times)) if isinstance(column, float) else column
            known[key] = [(at, number) for at, number in zip(self._times, numbers, strict=True) if number == number]
        return {key: samples for key, samples in known.items() if samples}

    def told(self) -> dict[str, Any]:
        """All of it as JSON can say it, for another process of this machine: see :meth:`of`."""
        columns = {
            key: column if isinstance(column, float) else column.tobytes().hex()
            for key, column in self._columns.items()
        }
        return {"times": self._times.tobytes().hex(), "columns": columns}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Past:
        """What was told."""
        past = cls()
        past._times.frombytes(bytes.fromhex(told["times"]))
        past._columns = {
            key: column if isinstance(column, float) else array("d", bytes.fromhex(column))
            for key, column in told["columns"].items()
        }
        return past


@functools.lru_cache(maxsize=512)
def _key(metric: Metric, labels: tuple[str, ...]) -> str:
    return series_key(metric.name, dict(zip(metric.labels, labels, strict=True)))
