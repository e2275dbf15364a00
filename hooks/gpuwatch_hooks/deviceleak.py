"""Memory of the device that is still held after each optimizer step, and more with every one: a leak, and until when.

What is allocated right after an optimizer step is the same at every step of a sound loop whose batches are of one size.
"""

from __future__ import annotations

from collections import deque

from gpuwatch.catalog import DEVICE_FULL_SECONDS
from gpuwatch.record import RecordWriter
from gpuwatch.sizes import time_text
from gpuwatch_hooks.accelerator import AllocatorCounters
from gpuwatch_hooks.trend import Trend

RULE = "leak-device"

LEAST_GROWTH_BYTES, LEAST_GROWTH_SHARE = 64 << 20, 0.02


class DeviceLeak:
    """Follows what is allocated between steps."""

    def __init__(self, record: RecordWriter) -> None:
        self.record = record
        self.trend = Trend()
        self.times: deque[int] = deque(maxlen=self.trend.readings.maxlen)
        self.varied = False
        self.leaking = False
        self.first_until = 0  # the last step of the window that first grew

    def due(self, step: int, varying: bool) -> bool:
        """Whether the counters are wanted at this step; ``varying`` when batches differ in size, or are not seen."""
        self.varied = self.varied or varying
        return not self.varied and self.trend.due(step)

    def read(self, step: int, now: int, counters: AllocatorCounters) -> None:
        """An optimizer has stepped; ``now`` in nanoseconds of CLOCK_MONOTONIC."""
        allocated = counters.allocated_bytes
        if allocated is None:
            return
        self.trend.add(step, allocated)
        self.times.append(now)
        grown, steps = self.trend.growth()
        if grown > max(LEAST_GROWTH_BYTES, LEAST_GROWTH_SHARE * allocated):
            self._grows(grown / steps, counters)
        elif self.leaking:
            self.leaking = False
            self.record.observe(RULE, "", "it has stopped to grow", 0.0)
            self._put_full(float("nan"))

    def _grows(self, per_step: float, counters: AllocatorCounters) -> None:
        first, last = self.trend.readings[0], self.trend.readings[-1]
        if not self.leaking:
            self.leaking, self.first_until = True, last[0]
        evidence = f"{last[1] - first[1]:,.0f} bytes more at step {last[0]:,} than at step {first[0]:,}"
        seconds = self._until_full(per_step, counters)
        if seconds is not None:
            evidence += f"; at this pace the device is full in about {time_text(seconds)}"
            if first[0] >= self.first_until:  # a second window, with nothing of the first
                self._put_full(seconds)
        self.record.observe(RULE, "", evidence, per_step)

    def _until_full(self, per_step: float, counters: AllocatorCounters) -> float | None:
        """Seconds until the peak of a step no longer fits; None where the peak or the capacity is not known."""
        if counters.capacity_bytes is None or counters.active_peak_bytes is None:
            return None
        readings = self.trend.readings
        step_seconds = (self.times[-1] - self.times[0]) / 1e9 / (readings[-1][0] - readings[0][0])
        return max(0, counters.capacity_bytes - counters.active_peak_bytes) / per_step * step_seconds

    def _put_full(self, seconds: float) -> None:
        self.record.values[self.record.series(DEVICE_FULL_SECONDS.name)] = seconds
