"""Where a search for holders begins: what the user's program can name at this moment.

Variables of the functions on the stack (of other threads too) and of all modules of the user's, the watched models, the
data sets of watched loaders, and the root logger, whose handlers may keep records.
Frames of torch, of the standard library and of gpuwatch hold nothing of the user's.
"""

from __future__ import annotations

import dis
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from gpuwatch_hooks.place import DEEPEST, is_foreign

OPAQUE = (ModuleType, BuiltinFunctionType, str, bytes, int, float, complex, bool, type(None))
"""Kinds that refer to nothing of interest."""

LEAST_PLAIN_BYTES = 16_384
"""Bytes of texts and numbers from which they are followed."""

OPTIMIZED = 0x1
"""CO_OPTIMIZED: a function's frame, whose locals are a copy; a module's or class body's are the real namespace."""

HELD_BY_FRAME_ALONE = 3
"""References to a frame's copy of its locals: the frame's own, ours, and the argument of the call that counts."""

MOST_THREADS = 16
"""Other threads whose functions are looked at."""

OWN_LOCALS = frozenset({"locals", "vars", "f_locals"})
"""Names in the code of a function that may hold the copy of its own variables."""

_OURS = frozenset({"gpuwatch", "gpuwatch_hooks"})
_BY_NAME = ("LOAD_GLOBAL", "LOAD_NAME")


class Root(NamedTuple):
    """An object with the name a user knows it by, and where that name is."""

    name: str
    thing: Any
    place: str


@dataclass(frozen=True)
class Roots:
    """Where a search begins: variables of the user's functions on the stack, of these functions' modules, of the user's
    other modules, of libraries' functions on the stack; the user's code on the stack, innermost first, and that of
    their modules' functions."""

    own: list[Root]
    near: list[Root]
    modules: list[Root]
    libraries: list[Root]
    codes: list[CodeType]
    functions: list[CodeType]


def stack_roots(frame: FrameType | None) -> Roots:
    """What can be named from a frame: what a person can change first, and a trainer's own frames may lead anywhere."""
    own: list[Root] = []
    libraries: list[Root] = []
    codes: list[CodeType] = []
    namespaces: dict[int, list[Root]] = {}
    for _ in range(DEEPEST):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if not is_foreign(file):
            library = "site-packages" in file
            if not library:
                codes.append(frame.f_code)
                if id(frame.f_globals) not in namespaces:
                    namespaces[id(frame.f_globals)] = _module_roots(frame.f_globals, _place(frame, "module"))
            if frame.f_code.co_flags & OPTIMIZED:
                place = _place(frame, frame.f_code.co_name)
                into = libraries if library else own
                into.extend(Root(name, thing, place) for name, thing in local_variables(frame))
        frame = frame.f_back
    functions: list[CodeType] = []
    modules: list[Root] = []
    for module, variables in own_modules():
        functions.extend(_code_of_functions(variables))
        if id(variables) not in namespaces:
            modules.extend(_module_roots(variables, f"{module} (module)"))
    logs = [Root("logging.root", logging.root, "logging (module)")]
    elsewhere, theirs = _of_other_threads()
    return Roots(
        [*own, *elsewhere],
        [root for roots in namespaces.values() for root in roots],
        [*modules, *logs],
        libraries,
        [*codes, *theirs],
        functions,
    )


def own_codes(frame: FrameType | None) -> set[CodeType]:
    """The user's code on the stack."""
    return set(_own_stack(frame))


def passes_through(frame: FrameType | None, codes: set[CodeType]) -> bool:
    """Whether the innermost code of the user's is another than this, which is further out."""
    return bool(codes) and next(_own_stack(frame), None) not in (*codes, None)


def _own_stack(frame: FrameType | None) -> Iterator[CodeType]:
    for _ in range(DEEPEST):
        if frame is None:
            return
        file = frame.f_code.co_filename
        if not is_foreign(file) and "site-packages" not in file:
            yield frame.f_code
        frame = frame.f_back


def _of_other_threads() -> tuple[list[Root], list[CodeType]]:
    """Variables of the user's functions in other threads: one that collects, writes, or waits for the training."""
    found: list[Root] = []
    codes: list[CodeType] = []
    here = threading.get_ident()
    others = [frame for thread, frame in sys._current_frames().items() if thread != here]
    for innermost in others[:MOST_THREADS]:
        frame: FrameType | None = innermost
        for _ in range(DEEPEST):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if frame.f_code.co_flags & OPTIMIZED and not is_foreign(file) and "site-packages" not in file:
                place = _place(frame, frame.f_code.co_name)
                codes.append(frame.f_code)
                found.extend(Root(name, thing, place) for name, thing in local_variables(frame))
            frame = frame.f_back
    return found, codes


def _code_of_functions(variables: dict[str, Any]) -> Iterator[CodeType]:
    """Code of functions that a module defines: it may take out again what others put into the module's variables."""
    for thing in list(variables.values()):
        if type(thing) is FunctionType and thing.__globals__ is variables:
            yield thing.__code__


def _module_roots(variables: dict[str, Any], place: str) -> list[Root]:
    return [Root(name, thing, place) for name, thing in list(variables.items()) if name[:2] != "__" and _keeps(thing)]


def _keeps(thing: Any) -> bool:
    """Whether it can keep anything: most names of a module are plain functions and imported classes."""
    kind = type(thing)
    if kind is FunctionType:
        return keeps_anything(thing)
    return len(thing) >= LEAST_PLAIN_BYTES if kind in (str, bytes) else not issubclass(kind, OPAQUE)


def keeps_anything(function: FunctionType) -> bool:
    """Whether a function has a closure, default arguments or attributes."""
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__)


_known: dict[str, bool] = {}
_own: list[str] = []


def own_modules() -> list[tuple[str, dict[str, Any]]]:
    """The user's modules, as (file, variables): those that are loaded from outside of any library."""
    for name in sys.modules.keys() - _known.keys():
        is_own_module(name)
    found = [(name, sys.modules.get(name)) for name in _own]
    return [(file_of_module(name), _variables(module)) for name, module in found if module is not None]


def is_own_module(name: object) -> bool:
    """Whether a module is the user's, by its name."""
    if type(name) is not str:
        return False
    if name not in _known and name in sys.modules:
        _known[name] = _is_own(name)
        if _known[name]:
            _own.append(name)
    return _known.get(name, False)


def _is_own(name: str) -> bool:
    if name == "__main__":
        return True
    module = sys.modules.get(name)
    file = _variables(module).get("__file__")
    if name.partition(".")[0] in _OURS or type(file) is not str:
        return False
    return not is_foreign(file) and "site-packages" not in file and "dist-packages" not in file


def _variables(module: object) -> dict[str, Any]:
    # Of a module that loads lazily an ordinary look at its attributes would load it.
    variables = object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else {}
    return variables if type(variables) is dict else {}


def file_of_module(name: str) -> str:
    """The name of its file."""
    return os.path.basename(str(_variables(sys.modules.get(name)).get("__file__", "")))


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
