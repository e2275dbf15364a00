"""Where a search for holders begins: what the user's program can name at this moment.

Variables of the functions on the stack and of their modules, the watched models, the data sets of watched loaders.
Frames of torch, of the standard library and of gpuwatch hold nothing of the user's.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from gpuwatch_hooks.place import DEEPEST, is_foreign

OPTIMIZED = 0x1
"""CO_OPTIMIZED: a function's frame, whose locals are a copy; a module's or class body's are the real namespace."""

HELD_BY_FRAME_ALONE = 3
"""References to a frame's copy of its locals: the frame's own, ours, and the argument of the call that counts."""

OWN_LOCALS = frozenset({"locals", "vars", "f_locals"})
"""Names in the code of a function that may hold the copy of its own variables."""

_BY_NAME = ("LOAD_GLOBAL", "LOAD_NAME")


@dataclass(frozen=True)
class Root:
    """An object with the name a user knows it by, and where that name is."""

    name: str
    thing: Any
    place: str


def stack_roots(frame: FrameType | None) -> tuple[list[Root], list[Root], list[Root]]:
    """The variables of the user's functions on the stack (innermost first), of their modules, of libraries' functions.

    In this order: what a person can change comes first, and a trainer's own frames may lead anywhere.
    """
    own: list[Root] = []
    libraries: list[Root] = []
    modules: dict[int, FrameType] = {}
    for _ in range(DEEPEST):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if not is_foreign(file):
            library = "site-packages" in file
            if not library:
                modules.setdefault(id(frame.f_globals), frame)
            if frame.f_code.co_flags & OPTIMIZED:
                place = _place(frame, frame.f_code.co_name)
                into = libraries if library else own
                into.extend(Root(name, thing, place) for name, thing in local_variables(frame))
        frame = frame.f_back
    return own, [root for holder in modules.values() for root in _module_roots(holder)], libraries


def _module_roots(frame: FrameType) -> Iterator[Root]:
    place = _place(frame, "module")
    for name, thing in list(frame.f_globals.items()):
        if not name.startswith("__"):
            yield Root(name, thing, place)


def local_variables(frame: FrameType) -> list[tuple[str, Any]]:
    """A function's variables, without leaving a trace.

    Before Python 3.13 reading a frame's locals makes a copy that the frame keeps, and with it every value, until it is
    read again: tensors would outlive their variables. The copy is emptied again, unless the program holds it itself.
    A function that asks for its ``locals()``, or one in a debugger, is left alone: it would see the copy change. From
    3.13 on it is a view of the real variables, and there is nothing to empty.
    """
    if sys.version_info < (3, 13) and (frame.f_trace is not None or asks_for_locals(frame.f_code)):
        return []
    variables = frame.f_locals
    named = list(variables.items())
    if sys.version_info < (3, 13) and sys.getrefcount(variables) <= HELD_BY_FRAME_ALONE:
        variables.clear()
    return named


@functools.lru_cache(maxsize=64)
def asks_for_locals(code: CodeType) -> bool:
    """Whether a function calls ``locals()`` or ``vars()``, or reads a frame's ``f_locals``."""
    return not OWN_LOCALS.isdisjoint(code.co_names) and any(
        step.argval in OWN_LOCALS and (step.opname in _BY_NAME or step.argval == "f_locals")
        for step in dis.get_instructions(code)
    )


def _place(frame: FrameType, scope: str) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({scope})"
