"""Where a search for holders begins: what the user's program can name at this moment.

Variables of the functions on the stack and of their modules, the watched models, the data sets of watched loaders.
Frames of torch, of the standard library and of gpuwatch hold nothing of the user's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gpuwatch_hooks.place import DEEPEST, is_foreign

OPTIMIZED = 0x1
"""CO_OPTIMIZED: a function's frame, whose locals are a copy; a module's or class body's are the real namespace."""

HELD_BY_FRAME_ALONE = 3
"""References to a frame's copy of its locals: the frame's own, ours, and the argument of the call that counts."""


@dataclass(frozen=True)
class Root:
    """An object with the name a user knows it by, and where that name is."""

    name: str
    thing: Any
    place: str


def roots(frame: FrameType | None) -> Iterator[Root]:
    """The variables on the stack, innermost first, then those of their modules."""
    modules: dict[int, FrameType] = {}
    for _ in range(DEEPEST):
        if frame is None:
            break
        if not is_foreign(frame.f_code.co_filename):
            modules.setdefault(id(frame.f_globals), frame)
            if frame.f_code.co_flags & OPTIMIZED:
                place = _place(frame, frame.f_code.co_name)
                for name, thing in local_variables(frame):
                    yield Root(name, thing, place)
        frame = frame.f_back
    for holder in modules.values():
        place = _place(holder, "module")
        for name, thing in list(holder.f_globals.items()):
            if not name.startswith("__"):
                yield Root(name, thing, place)


def local_variables(frame: FrameType) -> list[tuple[str, Any]]:
    """A function's variables, without leaving a trace.

    Before Python 3.13 reading a frame's locals makes a copy that the frame keeps, and with it every value, until it is
    read again: tensors would outlive their variables. The copy is emptied again, unless the program holds it itself
    (it called ``locals()``). From 3.13 on it is a view of the real variables, and there is nothing to empty.
    """
    variables = frame.f_locals
    named = list(variables.items())
    if sys.version_info < (3, 13) and sys.getrefcount(variables) <= HELD_BY_FRAME_ALONE:
        variables.clear()
    return named


def _place(frame: FrameType, scope: str) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({scope})"
