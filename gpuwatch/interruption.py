"""What a handler of a signal raises: Python calls it between any two instructions of the main thread, also in ours.

A time limit of the user's raises a TimeoutError, which is an OSError; torch tells of a dead loader worker by a
RuntimeError. Whoever catches one of those because a file is missing must not take the other for it.
"""

from __future__ import annotations

import signal
import sys
from itertools import pairwise
from types import CodeType, FrameType
from typing import TypeVar

__all__ = ["expected", "of_a_signal"]

E = TypeVar("E", bound=BaseException)

_MORE_ARGUMENTS = 4
"""The flag of code that takes any number of arguments, ``inspect.CO_VARARGS``; that module is large."""


def expected(*kinds: type[E]) -> tuple[type[E], ...]:
    """For ``except expected(OSError):`` these kinds, and none of them where a handler of a signal raised it."""
    fault = sys.exc_info()[1]
    return () if fault is not None and of_a_signal(fault) else kinds


def of_a_signal(fault: BaseException) -> bool:
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
