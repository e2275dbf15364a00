"""How the process ends: in order, by an exception, for want of memory. Written down while the numbers are there."""

from __future__ import annotations

import sys

from gpuwatch.catalog import RANK_EXIT_INFO
from gpuwatch.layout import SNAPSHOT_SUFFIX, State
from gpuwatch.limits import HOST_GROWTH_BYTES
from gpuwatch_hooks import oom
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.session import Session


def end_state() -> State:
    """How this process is ending."""
    return State.CLEAN if uncaught() is None else State.EXCEPTION


def note_uncaught(session: Session) -> None:
    """Write down the type of the exception that ends this process."""
    error = uncaught()
    if isinstance(error, BaseException) and not session.ended:
        cause = type(error).__name__
        session.record.values[session.record.series(RANK_EXIT_INFO.name, cause=cause)] = 1.0
        session.loading.note_death(error)
        note_shortage(session, error)


@guarded("oom")
def note_shortage(session: Session, error: BaseException) -> None:
    """When memory ran out: of which kind it was, while the numbers are still there."""
    allocator, growth = session.device.allocator, session.growth
    counters, used, on_device = None, None, type(error).__name__ == "OutOfMemoryError"
    if session.device.active and oom.is_out_of_memory(error):
        accelerator = session.device.accelerator
        counters, used = accelerator.counters(), accelerator.used_bytes()
        allocator.errors.read_ending(counters.ooms, on_device)
        accelerator.dump_history(str(session.record.path.with_suffix(SNAPSHOT_SUFFIX)))
    # A holder that was named may hold little; where the trend is judged, it tells whether that filled the memory.
    named = bool(session.leaks.said)
    known = oom.Circumstances(
        counters=counters,
        used_bytes=used,
        usual_peak=allocator.usual_peak(),
        leaking_device=allocator.leak.leaking or (named and allocator.leak.varied),
        leaking_host=growth.per_step() >= HOST_GROWTH_BYTES or (named and (growth.varied or not session.device.active)),
        caught=allocator.errors.caught,
        kills=session.memory.kills(),
    )
    oom.note(session.record, error, known)


def uncaught() -> object:
    """The exception that ends this process, None when there is none."""
    # The interpreter keeps an exception that nothing caught, before it prints the traceback and runs exit handlers.
    error: object = getattr(sys, "last_value", None)
    return error if error is not None else getattr(sys, "last_exc", None)
