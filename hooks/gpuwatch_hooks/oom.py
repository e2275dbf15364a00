"""Why memory ran out: written when an out-of-memory error ends the process, from numbers taken as it ended.

The error itself is not touched. On CUDA the allocator's counters still hold what they held when it was raised; on the
host the resident set does. An error that is caught and survived shows in the allocator's own count, and only there: a
MemoryError that the program catches cannot be seen.
"""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import dataclass

from gpuwatch.catalog import OOM_KINDS, OUT_OF_MEMORY
from gpuwatch.layout import Word
from gpuwatch.record import RecordWriter
from gpuwatch.sizes import UNITS, size_text
from gpuwatch_hooks.accelerator import AllocatorCounters
from gpuwatch_hooks.place import place_of_traceback

RULE = "mem-oom"

CAPACITY, FRAGMENTATION, FOREIGN, SPIKE, LEAK, HOST, KILLED = OOM_KINDS

FRAGMENTED_SHARE = 0.10
FOREIGN_SHARE = 0.15
SPIKE_FACTOR = 1.2

_WORDS = {
    CAPACITY: "the live tensors of a step need more than there is",
    FRAGMENTATION: "the allocator holds enough free memory, but in pieces too small for this request",
    FOREIGN: "other processes, or memory outside torch's cache, hold a large part of the device",
    SPIKE: "this step needed far more than any before it: a longer sequence, a larger batch",
    LEAK: "memory grew step by step until it was full; the leak's own finding names the holder",
    HOST: "the host could not give the process more memory",
    KILLED: "the kernel killed a loader worker because the host's memory had run out",
}

_UNITS = {"B": 1, "bytes": 1, **UNITS}
_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*(is killed by signal: Killed|exited unexpectedly)", re.DOTALL)


@dataclass(frozen=True)
class Circumstances:
    """What is known when an error ends the process. Bytes; None where unknown.

    ``usual_peak`` is the largest peak of the steps before, ``leaking_*`` whether what fills the device, or the host,
    grew step by step, ``kills`` how many processes of the control group the kernel has killed for memory since attach.
    """

    counters: AllocatorCounters | None = None
    used_bytes: int | None = None
    usual_peak: int | None = None
    leaking_device: bool = False
    leaking_host: bool = False
    caught: int = 0
    kills: int = 0


@dataclass(frozen=True)
class Shortage:
    """One shortage of memory with the numbers behind it, in bytes; None where unknown."""

    kind: str
    requested_bytes: int | None
    counters: AllocatorCounters | None
    circumstances: Circumstances

    def evidence(self) -> str:
        """The kind in words and its numbers."""
        known, counters = self.circumstances, self.counters
        parts = [f"{self.kind}: {_WORDS[self.kind]}"]
        if self.requested_bytes is not None:
            parts.append(f"{size_text(self.requested_bytes)} were asked for")
        if counters is not None:
            numbers = (
                ("allocated", counters.allocated_bytes),
                ("reserved", counters.reserved_bytes),
                ("peak", counters.active_peak_bytes),
                ("peak of the steps before", known.usual_peak),
                ("in use on the device", known.used_bytes),
                ("capacity", counters.capacity_bytes),
            )
            parts.append(", ".join(f"{name} {size_text(number)}" for name, number in numbers if number is not None))
        if self.kind == KILLED:
            parts.append(f"{known.kills:,} of its control group since attach")
        if known.caught:
            parts.append(f"{known.caught:,} before it were caught")
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


def shortage_of(error: BaseException, known: Circumstances) -> Shortage | None:
    """Of which kind the shortage is that this error tells of; None for any other error."""
    if known.kills and _is_of_a_dead_worker(error):
        return Shortage(KILLED, None, None, known)
    if not is_out_of_memory(error):
        return None
    requested = requested_bytes(str(error))
    if type(error).__name__ == "OutOfMemoryError":
        kind = classify(requested, known.counters, known.used_bytes, known.leaking_device, known.usual_peak)
        return Shortage(kind, requested, known.counters, known)
    return Shortage(LEAK if known.leaking_host else HOST, requested, None, known)


def _is_of_a_dead_worker(error: BaseException) -> bool:
    """Whether torch says that a loader worker died, or its end of a pipe or a socket was gone before torch could."""
    if isinstance(error, RuntimeError):
        return _WORKER_DIED.search(str(error)) is not None
    if not isinstance(error, (EOFError, OSError)):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    return any(f"{os.sep}multiprocessing{os.sep}" in frame.f_code.co_filename for frame, _ in frames)


def note(record: RecordWriter, error: BaseException, known: Circumstances) -> None:
    """Write the post-mortem of an error that ends the process; nothing for any other error."""
    shortage = shortage_of(error, known)
    if shortage is None:
        return
    where = place_of_traceback(error.__traceback__)
    record.values[record.series(OUT_OF_MEMORY.name, kind=shortage.kind)] = 1.0
    record.observe(RULE, where, f"at step {_step(record)}: {shortage.evidence()}", 1.0)


def _step(record: RecordWriter) -> str:
    """The step that is under way; the clock may not have worked through the last ones yet."""
    return f"{record.words[Word.STEP] + 1:,}"


class CaughtErrors:
    """Out-of-memory errors of the device that did not end the run: the growth of the allocator's own count.

    ``before`` is the count at attach, None where there was none to be had.
    """

    def __init__(self, record: RecordWriter, before: int | None) -> None:
        self.record = record
        self.before = before
        self.caught = 0

    def read_ending(self, count: int | None, on_device: bool) -> None:
        """An error ends the process: when it is the device's, it is the last that was counted, and was not caught."""
        if count is not None and on_device and self.before is not None and count > self.before:
            self.read(count - 1)
            self.before = count
        else:
            self.read(count)

    def read(self, count: int | None) -> None:
        """The allocator has counted so many by now."""
        if count is None:
            return
        before, self.before = self.before, count
        new = 0 if before is None else count - before if count >= before else count  # a count that fell was reset
        if new > 0:
            self.caught += new
            evidence = (
                f"{self.caught:,} out-of-memory error{'s' if self.caught > 1 else ''} of the device, caught by the "
                f"program or by a library that tries out algorithms; the last one by step {_step(self.record)}"
            )
            self.record.observe(RULE, "", evidence, self.caught)
