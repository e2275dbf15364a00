"""A GPU's recent past: NVML is asked every second in a thread of its own, and the last minutes are kept.

Whoever scrapes or looks at a page takes the last sample and never waits for a driver, which may be stuck. A sample
that is no longer fresh is not shown at all.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpuwatch.catalog import (
    CLOCK_REASONS,
    GPU_CLOCK_REASON,
    GPU_ECC_CORRECTED,
    GPU_ECC_UNCORRECTED,
    GPU_ENERGY,
    GPU_FOREIGN_MEMORY,
    GPU_GRAVE_ERRORS,
    GPU_INFO,
    GPU_MEMORY_BUSY,
    GPU_MEMORY_CLOCK,
    GPU_MEMORY_RESERVED,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
    GPU_NVLINK_RECEIVED,
    GPU_NVLINK_SENT,
    GPU_PCIE_GENERATION,
    GPU_PCIE_GENERATION_MAX,
    GPU_PCIE_RECEIVED,
    GPU_PCIE_REPLAYS,
    GPU_PCIE_SENT,
    GPU_PCIE_WIDTH,
    GPU_PCIE_WIDTH_MAX,
    GPU_POWER,
    GPU_POWER_DEFAULT_LIMIT,
    GPU_POWER_LIMIT,
    GPU_PROCESSES,
    GPU_REMAP_FAILED,
    GPU_REMAP_PENDING,
    GPU_REMAPPED_ROWS,
    GPU_SM_CLOCK,
    GPU_SM_CLOCK_MAX,
    GPU_TEMPERATURE,
    GPU_THROTTLED,
    GPU_UTILIZATION,
    GPU_XID_ERRORS,
    GPU_XID_TIME,
    GRAVE_XIDS,
)
from gpuwatch.expr import History, Metric, series_key
from gpuwatch.nvml import GpuReading, NvmlUnavailable

PERIOD_SECONDS = 1.0
KEPT_SAMPLES = 300
DROPPED_SAMPLES = 60
"""Kept beyond that, and dropped together."""

MOST_GPUS = 128
MOST_COLUMNS = 128
FRESH_SECONDS = 5.0
"""A sample older than this says nothing about now: the driver does not answer."""

FEWEST_SAMPLES = 10
"""Samples below which nothing is judged: a moment is no finding."""

THERMAL = CLOCK_REASONS["sw_thermal"] | CLOCK_REASONS["hw_thermal"] | CLOCK_REASONS["hw_power_brake"]
"""Clock reasons that are a fault of cooling or power; the normal power cap is none."""

MOST_XIDS = 16
"""Error codes of one GPU that are published: the label comes from the driver, and has to have an end."""

NOT_YET = "no GPU telemetry yet: NVML has not answered"
STUCK = f"no GPU telemetry: NVML has not answered for {FRESH_SECONDS:g} s; the driver may be stuck"


@dataclass(frozen=True)
class Sample:
    """All GPUs at one time. ``taken`` is monotonic, ``taken_at`` Unix time, ``seconds`` how long it took."""

    taken: float
    taken_at: float
    seconds: float
    readings: tuple[GpuReading, ...]


class Past:
    """The recent readings of one GPU as numbers: as objects, five minutes of eight GPUs would be 6 MB."""

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


@functools.lru_cache(maxsize=512)
def _key(metric: Metric, labels: tuple[str, ...]) -> str:
    return series_key(metric.name, dict(zip(metric.labels, labels, strict=True)))


class Sampler:
    """Takes samples in a daemon thread. What :meth:`latest` and the rest give is a copy, for any thread."""

    def __init__(self, read: Callable[[], Sequence[GpuReading]], period_seconds: float = PERIOD_SECONDS) -> None:
        self._read = read
        self._period_seconds = period_seconds
        self._lock = threading.Lock()
        self._last: Sample | None = None
        self._past: dict[tuple[int, str | None], Past] = {}
        self._unavailable: str | None = NOT_YET
        self._stopped = threading.Event()
        # A daemon thread: one that is stuck in the driver must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="gpuwatch-nvml", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples; does not wait for a driver that is stuck."""
        self._stopped.set()

    def latest(self) -> Sample | None:
        """The last sample, None when it is not fresh or when NVML said at the last try that it is not there."""
        with self._lock:
            sample = self._last
            if self._unavailable is not None or sample is None:
                return None
        return sample if time.monotonic() - sample.taken <= FRESH_SECONDS else None

    def last_collected(self) -> Sample | None:
        """The last sample however old."""
        with self._lock:
            return self._last

    def unavailable(self) -> str | None:
        """Why there is no fresh sample, in one line; None when there is one."""
        if self.latest() is not None:
            return None
        with self._lock:
            return self._unavailable or STUCK

    def history(self, gpu: GpuReading) -> History:
        """What the rules read of this GPU; empty before there are enough samples."""
        with self._lock:
            past = self._past.get((gpu.index, gpu.uuid))
            return {} if past is None else past.history()

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                readings = tuple(self._read())
            except NvmlUnavailable as reason:
                with self._lock:
                    self._unavailable = str(reason)
            else:
                now = time.monotonic()
                with self._lock:
                    self._unavailable = None
                    self._keep(Sample(now, time.time(), now - began, readings))
            self._stopped.wait(self._period_seconds)

    def _keep(self, sample: Sample) -> None:
        self._last = sample
        for reading in sample.readings:
            gpu = reading.index, reading.uuid
            if gpu not in self._past and len(self._past) >= MOST_GPUS:
                self._past.clear()  # GPUs that come and go under ever new names
            self._past.setdefault(gpu, Past()).add(sample.taken, reading)


def gpu_series(reading: GpuReading) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    """A reading as (metric, values of the metric's own labels, number); what is not known is left out."""
    yield GPU_INFO, (reading.name or "", reading.pci_bus_id or ""), 1.0
    numbers = (
        (GPU_UTILIZATION, reading.utilization_ratio),
        (GPU_MEMORY_USED, reading.memory_used_bytes),
        (GPU_MEMORY_RESERVED, reading.memory_reserved_bytes),
        (GPU_MEMORY_TOTAL, reading.memory_total_bytes),
        (GPU_POWER, reading.power_watts),
        (GPU_POWER_LIMIT, reading.power_limit_watts),
        (GPU_ENERGY, reading.energy_joules),
        (GPU_TEMPERATURE, reading.temperature_celsius),
        (GPU_SM_CLOCK, reading.sm_clock_hertz),
        (GPU_SM_CLOCK_MAX, reading.sm_clock_max_hertz),
        (GPU_PROCESSES, None if reading.processes is None else len(reading.processes)),
        (GPU_FOREIGN_MEMORY, foreign_bytes(reading)),
        (GPU_MEMORY_BUSY, reading.memory_busy_ratio),
        (GPU_MEMORY_CLOCK, reading.memory_clock_hertz),
        (GPU_POWER_DEFAULT_LIMIT, reading.power_default_limit_watts),
        (GPU_ECC_CORRECTED, reading.ecc_corrected),
        (GPU_ECC_UNCORRECTED, reading.ecc_uncorrected),
        (GPU_XID_TIME, reading.xid_at),
        (GPU_PCIE_GENERATION, reading.pcie_generation),
        (GPU_PCIE_GENERATION_MAX, reading.pcie_generation_max),
        (GPU_PCIE_WIDTH, reading.pcie_width),
        (GPU_PCIE_WIDTH_MAX, reading.pcie_width_max),
        (GPU_PCIE_REPLAYS, reading.pcie_replays),
        (GPU_PCIE_SENT, reading.pcie_sent_bytes),
        (GPU_PCIE_RECEIVED, reading.pcie_received_bytes),
        (GPU_NVLINK_SENT, reading.nvlink_sent_bytes),
        (GPU_NVLINK_RECEIVED, reading.nvlink_received_bytes),
    )
    yield from ((metric, (), float(number)) for metric, number in numbers if number is not None)
    if reading.clock_reasons is not None:
        for reason, bit in CLOCK_REASONS.items():
            yield GPU_CLOCK_REASON, (reason,), float(bool(reading.clock_reasons & bit))
        yield GPU_THROTTLED, (), float(bool(reading.clock_reasons & THERMAL))
    if reading.remapped_rows is not None:
        corrected, uncorrected, pending, failed = reading.remapped_rows
        yield GPU_REMAPPED_ROWS, ("corrected",), float(corrected)
        yield GPU_REMAPPED_ROWS, ("uncorrected",), float(uncorrected)
        yield GPU_REMAP_PENDING, (), float(bool(pending))
        yield GPU_REMAP_FAILED, (), float(bool(failed))
    # Zero for the codes that matter most: a counter that appears at 1 has not risen, as far as Prometheus can tell.
    seen = {**dict.fromkeys(GRAVE_XIDS, 0), **dict(reading.xids)} if reading.xids is not None else {}
    if reading.xids is not None or reading.ecc_uncorrected is not None:
        codes = sum(count for code, count in reading.xids or () if code in GRAVE_XIDS)
        yield GPU_GRAVE_ERRORS, (), float(codes + (reading.ecc_uncorrected or 0))
    for code, count in sorted(seen.items())[:MOST_XIDS]:
        yield GPU_XID_ERRORS, (str(code),), float(count)


def foreign_bytes(reading: GpuReading) -> int | None:
    """Memory of processes that belong to no watched run; None where that cannot be told."""
    return None if reading.foreign_processes is None else sum(size for _, size in reading.foreign_processes)


def gpu_labels(reading: GpuReading) -> tuple[str, str]:
    """The values of the labels that identify a GPU: its index and its uuid."""
    return str(reading.index), reading.uuid or ""
