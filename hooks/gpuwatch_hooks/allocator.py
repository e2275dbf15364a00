"""The caching allocator, followed while the run goes on: its counters, their rates, and what they hint at.

Everything is read from the host, at most ten times a second, and changes nothing. A snapshot of the allocator's
segments is taken only under memory pressure, and at most every five minutes.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from gpuwatch.catalog import (
    ALLOC_RETRIES,
    ALLOC_RETRY_RATE,
    CACHE_EMPTIED_RATE,
    DEVICE_ACTIVE,
    DEVICE_ACTIVE_PEAK,
    DEVICE_ALLOCATED,
    DEVICE_ALLOCATED_PEAK,
    DEVICE_CALL_RATE,
    DEVICE_CALLS,
    DEVICE_CAPACITY,
    DEVICE_INACTIVE_SPLIT,
    DEVICE_NOT_TORCH,
    DEVICE_PRIVATE_POOLS,
    DEVICE_REQUESTED,
    DEVICE_RESERVED,
    DEVICE_SEGMENTS,
    DEVICE_STEP_ACTIVE,
    HOST_PINNED,
    OOMS,
)
from gpuwatch.expr import Metric
from gpuwatch.record import RecordWriter
from gpuwatch_hooks import allocconf
from gpuwatch_hooks.accelerator import Accelerator, AllocatorCounters
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.deviceleak import DeviceLeak
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.oom import CaughtErrors

STRANDED_RULE = "frag-stranded-split"

WARM_UP_STEPS = 50
WINDOW_STEPS = 50
"""Steps over which a rate is taken, once the first ones are over."""

USUAL_STEPS = 16
"""Steps from which their peak is what a step usually needs: by then the optimizer has its state."""

BACKWARDS_KEPT = 16
BACKWARD_NANOSECONDS = 10_000_000
"""Between two readings at the start of a backward."""

USED_NANOSECONDS = 10_000_000_000
"""Between two questions to the driver, which may have to wait for a lock of it."""

OTHERS_KEPT = 3

SNAPSHOT_NANOSECONDS = 300_000_000_000
PRESSURE = 0.9
"""Share of the capacity that is reserved, from which holes in the segments matter."""

LEAST_STRANDED_SHARE = 0.2
LARGE_PAGE, SMALL_PAGE = 20 << 20, 2 << 20


class AllocatorProbe:
    """Reads the allocator's counters and writes what they say."""

    def __init__(self, record: RecordWriter, clock: StepClock, accelerator: Accelerator) -> None:
        self.record = record
        self.clock = clock
        self.accelerator = accelerator
        self.windows: deque[tuple[int, tuple[int, int, int]]] = deque(maxlen=3)
        self.at_backward: deque[int] = deque(maxlen=BACKWARDS_KEPT)
        self.not_torch: deque[int] = deque(maxlen=OTHERS_KEPT)
        self.leak = DeviceLeak(record)
        self.errors = CaughtErrors(record, errors_so_far(accelerator))
        self._peak: int | None = None
        self._peak_step = 0
        self.stranding = False
        self.checked = False
        self.failures = 0  # retries and errors at the last look at the segments
        self._next_backward = self._next_used = self._next_snapshot = 0

    def read(self, now: int) -> None:
        """Take the counters down; ``now`` in nanoseconds of CLOCK_MONOTONIC."""
        counters = sound(self.accelerator.counters())
        self._put(DEVICE_ALLOCATED, counters.allocated_bytes)
        self._put(DEVICE_ALLOCATED_PEAK, counters.allocated_peak_bytes)
        self._put(DEVICE_ACTIVE, counters.active_bytes)
        self._put(DEVICE_ACTIVE_PEAK, counters.active_peak_bytes)
        self._put(DEVICE_RESERVED, counters.reserved_bytes)
        self._put(DEVICE_REQUESTED, counters.requested_bytes)
        self._put(DEVICE_INACTIVE_SPLIT, counters.inactive_split_bytes)
        self._put(DEVICE_PRIVATE_POOLS, counters.private_pool_bytes)
        self._put(DEVICE_CAPACITY, counters.capacity_bytes)
        self._put(DEVICE_SEGMENTS, counters.segments)
        self._put(ALLOC_RETRIES, counters.alloc_retries)
        self._put(OOMS, counters.ooms)
        if counters.device_allocs is not None and counters.device_frees is not None:
            self._put(DEVICE_CALLS, counters.device_allocs + counters.device_frees)
        self._peak, self._peak_step = counters.active_peak_bytes, self.clock.steps
        self.errors.read(counters.ooms)
        self._rates(counters)
        if now >= self._next_used:
            self._next_used = now + USED_NANOSECONDS
            self._others(counters.reserved_bytes)
            self._put(HOST_PINNED, self.accelerator.pinned_bytes())
        if not self.checked:
            self.checked = True
            self._check_settings()
        self._look_at_segments(now, counters)

    def _others(self, reserved: int | None) -> None:
        """What is in use beside the cache: the least of some readings, so that nobody's moment counts."""
        used = self.accelerator.used_bytes()
        if used is not None and reserved is not None:
            self.not_torch.append(max(0, used - reserved))
            if len(self.not_torch) == OTHERS_KEPT:
                self._put(DEVICE_NOT_TORCH, min(self.not_torch))

    def _put(self, metric: Metric, number: float | None) -> None:
        if number is not None:
            self.record.values[self.record.series(metric.name)] = number

    # -- rates -------------------------------------------------------------------------------------------------------

    def _rates(self, counters: AllocatorCounters) -> None:
        """Retries, device calls and unforced flushes a step: the lesser of two windows, so that none is a burst."""
        step = self.clock.steps
        if step < WARM_UP_STEPS or (self.windows and step - self.windows[-1][0] < WINDOW_STEPS):
            return
        retries, syncs = counters.alloc_retries, counters.stream_syncs
        allocs, frees = counters.device_allocs, counters.device_frees
        if retries is None or syncs is None or allocs is None or frees is None:
            return
        self.windows.append((step, (retries, allocs + frees, syncs - retries)))
        if len(self.windows) < 3:
            return
        marks = list(self.windows)
        for place, metric in enumerate((ALLOC_RETRY_RATE, DEVICE_CALL_RATE, CACHE_EMPTIED_RATE)):
            rates = [
                (later[place] - earlier[place]) / (end - begin)
                for (begin, earlier), (end, later) in itertools.pairwise(marks)
            ]
            self._put(metric, max(0.0, min(rates)))

    # -- the step's own course ---------------------------------------------------------------------------------------

    def backward_begin(self, now: int) -> None:
        """During a look a backward starts: about the most that the step needs is in use."""
        if now < self._next_backward:
            return
        self._next_backward = now + BACKWARD_NANOSECONDS
        active = sound(self.accelerator.counters()).active_bytes
        if active is not None:
            self.at_backward.append(active)
            self._put(DEVICE_STEP_ACTIVE, max(self.at_backward))

    def step_end(self, varying: bool, now: int) -> None:
        """During a look an optimizer has stepped: what is allocated now should be the same at every step."""
        if self.leak.due(self.clock.steps, varying):
            self.leak.read(self.clock.steps, now, sound(self.accelerator.counters()))

    def usual_peak(self) -> int | None:
        """The largest active bytes as they were after the steps before; None before there were enough of them."""
        return self._peak if self._peak_step >= USUAL_STEPS else None

    # -- settings ----------------------------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        """Once, when the device is in use: torch has read the environment by then."""
        settings = allocconf.in_force(os.environ)
        expandable = None
        if "expandable_segments" in settings:
            told = (self.accelerator.snapshot() or {}).get("allocator_settings")
            if isinstance(told, Mapping) and "expandable_segments" in told:
                expandable = bool(told["expandable_segments"])
        for conflict in allocconf.conflicts(os.environ, expandable):
            self.record.observe(allocconf.CONFLICT_RULE, "environment", conflict, 1.0)
        for which, why in allocconf.unsafe(settings, self.accelerator.memory_fraction()):
            self.record.observe(allocconf.UNSAFE_RULE, which, why, 1.0)

    # -- segments ----------------------------------------------------------------------------------------------------

    def _look_at_segments(self, now: int, counters: AllocatorCounters) -> None:
        reserved, capacity = counters.reserved_bytes, counters.capacity_bytes
        failures = (counters.alloc_retries or 0) + (counters.ooms or 0)
        if not reserved or now < self._next_snapshot:
            return
        if failures <= self.failures and not (capacity and reserved >= PRESSURE * capacity):
            return
        self.failures = failures
        self._next_snapshot = now + SNAPSHOT_NANOSECONDS
        segments = (self.accelerator.snapshot() or {}).get("segments")
        if not isinstance(segments, list):
            return
        trapped, hole = stranded(segments)
        share = trapped / reserved
        if share >= LEAST_STRANDED_SHARE:
            self.stranding = True
            evidence = f"{share:.0%} of what is reserved; the largest hole is {hole:,} bytes"
            self.record.observe(STRANDED_RULE, "", evidence, trapped)
        elif self.stranding:
            self.stranding = False
            self.record.observe(STRANDED_RULE, "", "no more", 0.0)


@guarded("allocator")
def errors_so_far(accelerator: Accelerator) -> int | None:
    """How many out-of-memory errors the allocator has counted; none where the device is not in use yet."""
    return accelerator.counters().ooms if accelerator.ready() else 0


def sound(counters: AllocatorCounters) -> AllocatorCounters:
    """The counters without those that another backend reports as zero (``cudaMallocAsync`` does)."""
    if counters.allocated_bytes and not counters.active_bytes:
        return AllocatorCounters(allocated_bytes=counters.allocated_bytes, capacity_bytes=counters.capacity_bytes)
    return counters


def stranded(segments: list[Any]) -> tuple[int, int]:
    """Free bytes trapped between live blocks, and the largest such hole.

    A segment that cannot grow is given back whole or not at all; of one that can, whole free pages are. Private pools
    are left out: nobody else may use them anyway.
    """
    total = largest = 0
    for segment in segments:
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        for hole in _holes(segment):
            total += hole
            largest = max(largest, hole)
    return total, largest


def _holes(segment: Mapping[str, Any]) -> Iterator[int]:
    blocks = segment["blocks"]
    inactive = [block for block in blocks if block["state"] == "inactive"]
    if segment.get("is_expandable"):
        page = LARGE_PAGE if segment.get("segment_type") == "large" else SMALL_PAGE
        at, sizes = 0, []
        for block in blocks:
            if block["state"] == "inactive":
                begin, end = at, at + block["size"]
                whole = max(0, end // page - -(-begin // page)) * page
                sizes.append(block["size"] - whole)
            at += block["size"]
        yield from sizes
    elif len(inactive) < len(blocks):
        yield from (block["size"] for block in inactive)
