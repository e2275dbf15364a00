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

    allocated_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    active_bytes: int | None = None
    active_peak_bytes: int | None = None
    reserved_bytes: int | None = None
    requested_bytes: int | None = None
    inactive_split_bytes: int | None = None
    private_pool_bytes: int | None = None
    capacity_bytes: int | None = None
    segments: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None
    device_allocs: int | None = None
    device_frees: int | None = None
    stream_syncs: int | None = None


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

    def used_bytes(self) -> int | None:
        """Bytes in use on the device by every process; a call of the driver."""

    def memory_fraction(self) -> float | None:
        """The share of the device that this process may use."""

    def pinned_bytes(self) -> int | None:
        """Bytes of the pool of pinned host memory."""

    def dump_history(self, path: str) -> None:
        """Write the allocator's recorded history to a file, where the program has its recording on."""

    def snapshot(self) -> Mapping[str, object] | None:
        """The allocator's segments and settings, without its history; costs some microseconds a block."""


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
        return AllocatorCounters(
            allocated_bytes=_number(stats, "allocated_bytes", "all", "current"),
            allocated_peak_bytes=_number(stats, "allocated_bytes", "all", "peak"),
            active_bytes=_number(stats, "active_bytes", "all", "current"),
            active_peak_bytes=_number(stats, "active_bytes", "all", "peak"),
            reserved_bytes=_number(stats, "reserved_bytes", "all", "current"),
            requested_bytes=_number(stats, "requested_bytes", "all", "current"),
            inactive_split_bytes=_number(stats, "inactive_split_bytes", "all", "current"),
            private_pool_bytes=_private_pools(stats),
            capacity_bytes=self._capacity(),
            segments=_number(stats, "segment", "all", "current"),
            alloc_retries=_number(stats, "num_alloc_retries"),
            ooms=_number(stats, "num_ooms"),
            device_allocs=_number(stats, "num_device_alloc"),
            device_frees=_number(stats, "num_device_free"),
            stream_syncs=_number(stats, "num_sync_all_streams"),
        )

    def _capacity(self) -> int:
        # The total that mem_get_info tells, without a call of the driver.
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return int(total * (self.memory_fraction() or 1.0))

    def used_bytes(self) -> int | None:
        """Total less free."""
        free, total = torch.cuda.mem_get_info()
        return total - free

    def memory_fraction(self) -> float | None:
        """None where this torch does not tell (before 2.8)."""
        ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        return None if ask is None else float(ask())

    def pinned_bytes(self) -> int | None:
        """None where this torch does not tell (before 2.7)."""
        ask = getattr(torch.cuda, "host_memory_stats", None)
        return None if ask is None else _number(ask(), "allocated_bytes.current")

    def dump_history(self, path: str) -> None:
        """Nothing where this torch does not tell whether the history is recorded, or it is not."""
        recording = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if recording is not None and recording():
            torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]

    def snapshot(self) -> Mapping[str, object] | None:
        """None where this torch cannot leave the history out: with it, a snapshot can take seconds."""
        try:
            found: Mapping[str, object] = torch._C._cuda_memorySnapshot((0, 0, False))
        except TypeError:
            return None
        return found


def _private_pools(stats: Mapping[str, object]) -> int | None:
    """What all private pools have reserved: their keys are unbounded, their sum is not."""
    pools = stats.get("reserved_bytes_by_private_pools")
    if not isinstance(pools, Mapping):
        return None
    return sum(_number(pool, "all", "current") or 0 for pool in pools.values() if isinstance(pool, Mapping))


def _number(stats: Mapping[str, object], *path: str) -> int | None:
    item: object = stats
    for key in path:
        if not isinstance(item, Mapping) or key not in item:
            return None
        item = item[key]
    return item if isinstance(item, int) else None
