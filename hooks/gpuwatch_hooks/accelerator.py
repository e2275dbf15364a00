"""The one door to the accelerator: what the hooks ask of it, and nothing that could wait for it.

No method synchronises, allocates on the device, or changes a counter. Tests put a scripted device behind it; on a real
one it is :class:`CudaAccelerator`, written from torch's documented interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AllocatorCounters:
    """The caching allocator's own numbers, in bytes and counts; None where this torch does not give one."""

    allocated_bytes: int | None
    active_peak_bytes: int | None
    reserved_bytes: int | None
    capacity_bytes: int | None
    alloc_retries: int | None
    ooms: int | None


class Event(Protocol):
    """A point on the device's clock."""

    def record(self) -> None:
        """Put it into the current stream, without waiting."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Event, /) -> float:
        """Milliseconds from this event to ``end``; both must have been passed."""


class Accelerator(Protocol):
    """What the hooks ask of a device."""

    def ready(self) -> bool:
        """Whether it is in use by this process already (asking must not initialise it), and not capturing a graph."""

    def event(self) -> Event:
        """A new event; they are reused, so that a run makes a fixed number of them."""

    def counters(self) -> AllocatorCounters:
        """The allocator's counters, read from the host."""


class CudaAccelerator:
    """CUDA and ROCm."""

    def ready(self) -> bool:
        """See :class:`Accelerator`."""
        return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]

    def event(self) -> Event:
        """A timing event."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, return-value]

    def counters(self) -> AllocatorCounters:
        """From ``memory_stats_as_nested_dict``: flattening the 171 keys costs ten times as much."""
        stats = torch.cuda.memory_stats_as_nested_dict()
        device = torch.cuda.current_device()
        return AllocatorCounters(
            allocated_bytes=_number(stats, "allocated_bytes", "all", "current"),
            active_peak_bytes=_number(stats, "active_bytes", "all", "peak"),
            reserved_bytes=_number(stats, "reserved_bytes", "all", "current"),
            capacity_bytes=torch.cuda.get_device_properties(device).total_memory,
            alloc_retries=_number(stats, "num_alloc_retries"),
            ooms=_number(stats, "num_ooms"),
        )


def _number(stats: Mapping[str, object], *path: str) -> int | None:
    item: object = stats
    for key in path:
        if not isinstance(item, Mapping) or key not in item:
            return None
        item = item[key]
    return item if isinstance(item, int) else None
