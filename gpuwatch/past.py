"""The recent readings of one GPU as numbers: as objects, five minutes of eight GPUs would be 6 MB."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Mapping
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
    """Times of the samples, and a column of numbers for each series."""

    def __init__(self) -> None:
        self._times = array("d")
        self._columns: dict[str, array[float]] = {}

    def add(self, taken: float, reading: GpuReading) -> None:
        """Append a reading; the oldest go once there are too many."""
        before = len(self._times)
        self._times.append(taken)
        for metric, labels, number in gpu_series(reading):
            key = _key(metric, labels)
            column = self._columns.get(key)
            if column is None:
                if len(self._columns) >= MOST_COLUMNS:
                    continue
                column = self._columns[key] = array("d", [math.nan]) * before
            column.append(number)
        for column in self._columns.values():
            if len(column) == before:
                column.append(math.nan)
        if len(self._times) >= KEPT_SAMPLES + DROPPED_SAMPLES:
            for column in (self._times, *self._columns.values()):
                del column[:DROPPED_SAMPLES]

    def history(self) -> History:
        """What the rules read; empty before there are enough samples."""
        if len(self._times) < FEWEST_SAMPLES:
            return {}
        known = {
            key: [(taken, number) for taken, number in zip(self._times, column, strict=True) if number == number]
            for key, column in self._columns.items()
        }
        return {key: samples for key, samples in known.items() if samples}

    def told(self) -> dict[str, Any]:
        """All of it as JSON can say it, for another process of this machine: see :meth:`of`."""
        columns = {key: column.tobytes().hex() for key, column in self._columns.items()}
        return {"times": self._times.tobytes().hex(), "columns": columns}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Past:
        """What was told."""
        past = cls()
        past._times.frombytes(bytes.fromhex(told["times"]))
        past._columns = {key: array("d", bytes.fromhex(column)) for key, column in told["columns"].items()}
        return past


@functools.lru_cache(maxsize=512)
def _key(metric: Metric, labels: tuple[str, ...]) -> str:
    return series_key(metric.name, dict(zip(metric.labels, labels, strict=True)))
