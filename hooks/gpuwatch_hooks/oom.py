"""Why memory ran out: written when an out-of-memory error ends the process, from numbers taken as it ended.

The error itself is not touched. On CUDA the allocator's counters still hold what they held when it was raised; on the
host the resident set does. An error that the program catches and survives shows in the allocator's own count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuwatch.record import RecordWriter
from gpuwatch_hooks.accelerator import AllocatorCounters
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.place import place_of_traceback
from gpuwatch_hooks.sizes import UNITS, size_text

RULE = "mem-oom"

CAPACITY, FRAGMENTATION, FOREIGN, SPIKE, LEAK, HOST = "capacity", "fragmentation", "foreign", "spike", "leak", "host"

FRAGMENTED_SHARE = 0.10
FOREIGN_SHARE = 0.15
SPIKE_FACTOR = 1.2

_WORDS = {
    CAPACITY: "the live tensors of a step need more than there is",
    FRAGMENTATION: "the allocator holds enough free memory, but in pieces too small for this request",
    FOREIGN: "other processes, or memory outside torch's cache, hold a large part of the device",
    SPIKE: "this step needed far more than a usual one: a longer sequence, a larger batch",
    LEAK: "memory grew step by step until it was full; the leak's own finding names the holder",
    HOST: "the host could not give the process more memory",
}

_UNITS = {"B": 1, "bytes": 1, **UNITS}


@dataclass(frozen=True)
class Shortage:
    """One out-of-memory error with the numbers behind it, in bytes; None where unknown."""

    kind: str
    requested_bytes: int | None
    counters: AllocatorCounters | None
    used_bytes: int | None

    def evidence(self) -> str:
        """The class in words and its numbers."""
        parts = [f"{self.kind}: {_WORDS[self.kind]}"]
        if self.requested_bytes is not None:
            parts.append(f"{size_text(self.requested_bytes)} were asked for")
        counters = self.counters
        if counters is not None:
            numbers = (
                ("allocated", counters.allocated_bytes),
                ("reserved", counters.reserved_bytes),
                ("in use on the device", self.used_bytes),
                ("capacity", counters.capacity_bytes),
            )
            parts.append(", ".join(f"{name} {size_text(number)}" for name, number in numbers if number is not None))
        return "; ".join(part for part in parts if part)


def is_out_of_memory(error: object) -> bool:
    """Whether an exception says that memory ran out, on a device or on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def requested_bytes(message: str) -> int | None:
    """How much was asked for, as torch's messages say it: ``Tried to allocate 2.00 GiB``."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) ?(B|bytes|KiB|MiB|GiB|TiB)\b", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def classify(
    requested: int | None, counters: AllocatorCounters | None, used: int | None, leaking: bool, usual_peak: int | None
) -> str:
    """Which kind of shortage it was; the first that the numbers bear out."""
    if counters is None or counters.capacity_bytes is None:
        return LEAK if leaking else CAPACITY
    capacity = counters.capacity_bytes
    reserved, allocated = counters.reserved_bytes or 0, counters.allocated_bytes or 0
    free = reserved - allocated
    if requested is not None and free >= requested and free >= FRAGMENTED_SHARE * capacity:
        return FRAGMENTATION
    if used is not None and used - reserved >= FOREIGN_SHARE * capacity:
        return FOREIGN
    if leaking:
        return LEAK
    peak = counters.active_peak_bytes
    if usual_peak and peak is not None and peak + (requested or 0) > SPIKE_FACTOR * usual_peak:
        return SPIKE
    return CAPACITY


def note(
    record: RecordWriter,
    clock: StepClock,
    error: BaseException,
    counters: AllocatorCounters | None,
    used: int | None,
    leaking: bool,
    usual_peak: int | None,
) -> None:
    """Write the post-mortem of an error that ends the process; nothing for any other error."""
    if not is_out_of_memory(error):
        return
    on_device = type(error).__name__ == "OutOfMemoryError"
    requested = requested_bytes(str(error))
    on_host = LEAK if leaking else HOST
    kind = classify(requested, counters, used, leaking, usual_peak) if on_device else on_host
    shortage = Shortage(kind, requested, counters if on_device else None, used)
    where = place_of_traceback(error.__traceback__)
    record.observe(RULE, where, f"at step {clock.steps + 1}: {shortage.evidence()}", 1.0)
