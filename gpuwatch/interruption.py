"""What is raised from outside, between any two instructions: by a handler of a signal, or by another thread.

A time limit of the user's raises a TimeoutError, which is an OSError; torch tells of a dead loader worker by a
RuntimeError. Whoever catches one of those because a file is missing must not take the other for it.
"""

from __future__ import annotations

import signal
import sys
from itertools import pairwise
from types import CodeType, FrameType
from typing import TypeVar

__all__ = ["expected", "from_outside"]

E = TypeVar("E", bound=BaseException)

_NEVER_THROWN = {*sys.stdlib_module_names, "builtins", "torch", "gpuwatch", "gpuwatch_hooks"}
_MORE_ARGUMENTS = 4
"""The flag of code that takes any number of arguments, ``inspect.CO_VARARGS``; that module is large."""


def expected(*kinds: type[E]) -> tuple[type[E], ...]:
    """For ``except expected(OSError):`` these kinds, and none of them where it was raised from outside."""
    fault = sys.exc_info()[1]
    return () if fault is not None and from_outside(fault) else kinds


def from_outside(fault: BaseException) -> bool:
    """Whether a handler of a signal raised it, or another thread did (as some time limits do)."""
    return _of_a_signal(fault) or _of_a_thread(fault)


def _of_a_signal(fault: BaseException) -> bool:
    """Whether a handler of a signal raised it: it is in the traceback, below the frame that it interrupted."""
    step = fault.__traceback__
    if step is None or step.tb_next is None:
        return False  # raised right where it is caught
    handlers = [getattr(handler, "func", handler) for handler in map(signal.getsignal, signal.valid_signals())]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers}
    while (step := step.tb_next) is not None:
        if step.tb_frame.f_code in codes or _was_handed_its_caller(step.tb_frame):
            return True
    return False


def _of_a_thread(fault: BaseException) -> bool:
    """Whether another thread made it appear here (``PyThreadState_SetAsyncExc``).

    That takes a class alone: the exception has no arguments, and the class is none that code of ours could raise.
    """
    step = fault.__traceback__
    if fault.args or step is None or str(type(fault).__module__).partition(".")[0] in _NEVER_THROWN:
        return False
    while step.tb_next is not None:
        step = step.tb_next
    return str(step.tb_frame.f_globals.get("__name__")).startswith("gpuwatch")


def _was_handed_its_caller(frame: FrameType) -> bool:
    """Whether it was called as handlers are, with a signal's number and the frame that was interrupted.

    A handler is not always known by its code: it may be an object, or have put the one before it back.
    """
    code: CodeType = frame.f_code
    given = frame.f_locals
    positional = [given.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & _MORE_ARGUMENTS:
        positional += given.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    return any(type(number) is int and caller is frame.f_back for number, caller in pairwise(positional))
