"""Other names of a container within code: a variable it is assigned to, a parameter that it is passed as."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from types import CodeType

from gpuwatch_hooks.bytecode import instructions, loads, mentions

FURTHER = 8
"""Instructions after a function's name within which the container is loaded as one of its arguments."""

_BOUND = ("self", "cls")
_PUSHES = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CONST")


def other_names(name: str, codes: list[CodeType], functions: Iterable[CodeType]) -> Iterator[tuple[CodeType, str]]:
    """Code with the name that the container has there, of ``codes`` and of the functions that these call."""
    called: dict[str, list[CodeType]] = {}
    for code in (*codes, *functions):
        called.setdefault(code.co_name, []).append(code)
    for code in codes:
        yield from ((code, alias) for alias in _variables(code, name))
        for function, place in _passed(code, name, frozenset(called.keys() & set(code.co_names + code.co_freevars))):
            for target in called[function]:
                own = target.co_varnames[: target.co_argcount]
                own = own[1:] if own[:1] and own[0] in _BOUND else own
                if place < len(own):
                    yield target, own[place]


@functools.lru_cache(maxsize=512)
def _variables(code: CodeType, name: str) -> tuple[str, ...]:
    """Variables that it is assigned to as it is: ``buffer = self.buffer``."""
    if not mentions(code, name):
        return ()
    steps = instructions(code)
    found = []
    for step, after in itertools.pairwise(steps):
        if loads(step, name) and after.opname.startswith(("STORE_FAST", "STORE_DEREF", "STORE_NAME")):
            found.append(after.argval[0] if type(after.argval) is tuple else after.argval)
    return tuple(alias for alias in found if type(alias) is str and alias != name)


@functools.lru_cache(maxsize=512)
def _passed(code: CodeType, name: str, functions: frozenset[str]) -> tuple[tuple[str, int], ...]:
    """Functions that it is passed to, and as which of their arguments, where those before are plain names."""
    if not functions or not mentions(code, name):
        return ()
    steps = instructions(code)
    found = []
    for at, step in enumerate(steps):
        if step.argval not in functions or not step.opname.startswith("LOAD_"):
            continue
        before = 0
        for later in steps[at + 1 : at + 1 + FURTHER]:
            if loads(later, name):
                pair = later.argval if type(later.argval) is tuple else (name,)
                # Of an attribute the object that it is one of was counted.
                found.append((str(step.argval), before + pair.index(name) - (later.opname == "LOAD_ATTR")))
                break
            if later.opname.startswith(_PUSHES):
                before += len(later.argval) if "_LOAD_" in later.opname and type(later.argval) is tuple else 1
            elif later.opname not in ("LOAD_ATTR", "PUSH_NULL"):
                break
    return tuple(found)
