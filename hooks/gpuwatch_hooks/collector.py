"""Listening to the garbage collector without losing what a signal raises meanwhile.

Python handles a signal that comes during a collection in the first function it runs afterwards. Where that is one of
``gc.callbacks``, it prints what the handler raised and drops it: Ctrl-C would do nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator
from types import FrameType

from gpuwatch_hooks.guard import log

Told = Callable[[str, dict[str, int]], None]


def listener(told: Told) -> Callable[..., object]:
    """What to put into ``gc.callbacks`` for a function that takes the phase and the details.

    A function cannot catch what is raised at its first instruction, but a generator that goes on in a ``try`` can.
    ``max`` hands it the two arguments one after the other, and needs no instruction of Python to do so.
    """
    generator = _listening(told)
    next(generator)
    return functools.partial(max, key=generator.send)


def _listening(told: Told) -> Generator[int, object, None]:
    while True:
        try:
            yield from _heard(told)
        except GeneratorExit:
            return
        except BaseException as fault:  # noqa: BLE001 - only to raise it where it is heard
            _raise_later(fault)


def _heard(told: Told) -> Generator[int, object, None]:
    phase = ""
    while True:
        sent = yield 0
        if isinstance(sent, str):
            phase = sent
        elif isinstance(sent, dict) and phase:
            told(phase, sent)


def _raise_later(fault: BaseException) -> None:
    """Raise it where the program goes on: at its next call or return."""
    if sys.getprofile() is not None:
        log.warning("lost under a profiler: what a handler of a signal raised during a collection", exc_info=fault)
        return

    def go_on(frame: FrameType | None, event: str, argument: object) -> None:
        while frame is not None:
            if frame.f_code is _listening.__code__:
                return  # still in a collection
            frame = frame.f_back
        sys.setprofile(None)
        raise fault

    sys.setprofile(go_on)
