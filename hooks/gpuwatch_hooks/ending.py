"""How the process ends: in order, by an exception, for want of memory. Written down while the numbers are there."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from multiprocessing import process, util

from gpuwatch.catalog import RANK_EXIT_INFO
from gpuwatch.layout import SNAPSHOT_SUFFIX, State
from gpuwatch.limits import HOST_GROWTH_BYTES
from gpuwatch_hooks import oom
from gpuwatch_hooks.backward import leave_no_frame
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.session import Session


def end_state(session: Session) -> State:
    """How this run ends."""
    return State.EXCEPTION if session.failed else State.CLEAN


def note_uncaught(session: Session) -> None:
    """Write down what ends this process, where that is no end in good order."""
    error = uncaught()
    if isinstance(error, BaseException):
        note(session, error)


def note(session: Session, error: BaseException) -> None:
    """Write down the exception that ends this run; an exit with status 0 is an end in good order."""
    if session.ended or session.failed:
        return
    cause = type(error).__name__
    if isinstance(error, SystemExit):
        status = exit_status(error.code)
        if not status:
            return
        cause = f"exit status {status}"
        if isinstance(error.__context__, Exception):  # programs print what failed and exit
            error = error.__context__
            cause += f", as {type(error).__name__} was handled"
    session.failed = True
    session.record.values[session.record.series(RANK_EXIT_INFO.name, cause=cause)] = 1.0
    session.loading.note_death(error)
    note_shortage(session, error)


def exit_status(code: object) -> int:
    """The status of a process whose program exits with this: a text is printed and is 1."""
    if code is None:
        return 0
    return code & 255 if isinstance(code, int) else 1


class _Rider:
    """Rides on the exception of a ``sys.exit``, and goes with it: where nothing of the program runs any more, it was
    caught by nobody, and the interpreter ends for it. It keeps no trace of that itself."""

    __slots__ = ("error", "session")

    def __init__(self, session: Session, error: SystemExit) -> None:
        self.session = session
        # One of its own, since it goes with the other.
        self.error = SystemExit(error.code)
        self.error.__context__ = error.__context__

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            exited(self.session, self.error)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return object, ()  # an exception that is copied or sent elsewhere takes nothing of ours along


@guarded("exit")
def exited(session: Session, error: SystemExit) -> None:
    """The program exits."""
    note(session, error)


def follow_exits(session: Session) -> Callable[[], None]:
    """Listen to ``sys.exit``; the returned function stops it."""
    original = sys.exit

    @functools.wraps(original)
    def told_exit(*arguments: object) -> object:
        try:
            return original(*arguments)  # type: ignore[arg-type]
        finally:
            send_along(session)
            leave_no_frame()

    def restore() -> None:
        if sys.exit is told_exit:  # someone else's wrapper on top stays
            sys.exit = original

    sys.exit = told_exit  # type: ignore[assignment]
    return restore


@guarded("exit")
def send_along(session: Session) -> None:
    """``sys.exit`` was called; what it raised may be caught yet."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and not session.ended and threading.current_thread() is threading.main_thread():
        vars(error)["_gpuwatch"] = _Rider(session, error)


def follow_child(farewell: Callable[[], object]) -> Callable[[], None]:
    """Say farewell at the end of a process that multiprocessing started: those that it forks run no exit handlers.

    What ends such a process is still on its way then. The returned function takes it back.
    """
    if process.parent_process() is None:
        return lambda: None
    ending = util.Finalize(None, farewell, exitpriority=1000)
    return lambda: ending.cancel()


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
    # A child of multiprocessing ends while it is still on its way.
    if sys.exc_info()[1] is not None:
        return sys.exc_info()[1]
    # The interpreter keeps an exception that nothing caught, before it prints the traceback and runs exit handlers.
    error: object = getattr(sys, "last_value", None)
    return error if error is not None else getattr(sys, "last_exc", None)
