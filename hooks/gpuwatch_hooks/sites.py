"""The line of the user's that makes a container grow, or a tensor: found in the code that uses its name."""

from __future__ import annotations

import dis
import functools
import os
from collections.abc import Iterable
from types import CodeType
from typing import Any

from gpuwatch_hooks.bounds import related
from gpuwatch_hooks.bytecode import argument_of, instructions, loads, mentions, names
from gpuwatch_hooks.joins import JOINS

_METHODS = frozenset(
    {"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put", "put_nowait", "add_param_group"}
    | {"write", "writelines"}
)
_FUNCTIONS = frozenset({"heappush", "heappushpop", "insort", "insort_left", "insort_right"})
_ADDS = ("+=", "+")
FURTHER = 4
"""Instructions after its name within which a method that adds to it is called: an index may come between."""

MOST_CODES = 512


def grown_at(name: str, codes: Iterable[CodeType], owner: Any) -> str:
    """``file.py:line (function)`` of a place where what goes by this identifier grows; an empty text if none."""
    for number, code in enumerate(related(codes, owner)):
        line = _line(code, name) if number < MOST_CODES else None
        if line is not None:
            where = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
            return f"{os.path.basename(code.co_filename)}:{line} ({where})"
    return ""


@functools.lru_cache(maxsize=512)
def _line(code: CodeType, name: str) -> int | None:
    if not mentions(code, name):
        return None
    line: int | None = code.co_firstlineno
    loaded = added = False
    ahead = instructions(code)
    for place, step in enumerate(ahead):
        line = step.starts_line if type(step.starts_line) is int else _number(step, line)
        if step.opname.startswith("STORE_"):
            if (loaded and added and names(step, name)) or (loaded and step.opname == "STORE_SUBSCR"):
                return line
            loaded = added = False
        elif step.opname == "POP_TOP":
            loaded = added = False
        added = (
            added
            or (step.opname.startswith("LOAD_") and step.argval in JOINS)
            or (step.opname.startswith("BINARY_OP") and step.argrepr in _ADDS)
            or "ADD" in step.opname
        )
        if loads(step, name):
            loaded = True
            if any(later.argval in _METHODS for later in ahead[place + 1 : place + 1 + FURTHER]):
                return line
            if argument_of(ahead, place, _FUNCTIONS):
                return line
    return None


def _number(step: dis.Instruction, before: int | None) -> int | None:
    """Newer Pythons say the line of each instruction."""
    number = getattr(step, "line_number", None)
    return number if type(number) is int else before
