"""A GPU's recent past: NVML is asked every second in a thread of its own, and the last minutes are kept.

Whoever scrapes or looks at a page takes the last sample and never waits for a driver, which may be stuck. A sample
that is no longer fresh is not shown at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuwatch.expr import History
from gpuwatch.nvml import GpuReading, NvmlUnavailable
from gpuwatch.past import Past

PERIOD_SECONDS = 1.0
MOST_GPUS = 128
FRESH_SECONDS = 5.0
"""A sample older than this says nothing about now: the driver does not answer."""

NOT_YET = "no GPU telemetry yet: NVML has not answered"
STUCK = f"no GPU telemetry: NVML has not answered for {FRESH_SECONDS:g} s; the driver may be stuck"


@dataclass(frozen=True)
class Sample:
    """All GPUs at one time. ``taken`` is monotonic, ``taken_at`` Unix time, ``seconds`` how long it took."""

    taken: float
    taken_at: float
    seconds: float
    readings: tuple[GpuReading, ...]


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

    def told(self) -> Iterator[Any]:
        """What it knows, piece by piece as JSON can say it, for another process of this machine: see :meth:`of`."""
        sample = self.latest()
        yield self.unavailable(), None if sample is None else asdict(sample)
        for gpu, past in tuple(self._past.items()):
            with self._lock:
                told = past.told()
            yield *gpu, told

    @classmethod
    def of(cls, told: Iterable[Any]) -> Sampler:
        """One that knows what was told, and takes no samples."""
        sampler = cls(list)
        (sampler._unavailable, last), *pasts = told
        if last is not None:
            sampler._last = Sample(**{**last, "readings": tuple(map(_reading, last["readings"]))})
        sampler._past = {(index, uuid): Past.of(past) for index, uuid, past in pasts}
        return sampler

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


def _reading(told: Mapping[str, Any]) -> GpuReading:
    return GpuReading(**{name: _tuples(part) for name, part in told.items()})


def _tuples(part: Any) -> Any:
    return tuple(map(_tuples, part)) if isinstance(part, list) else part
