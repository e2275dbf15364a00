"""The instructions of a piece of the user's code, and what they say of a name."""

from __future__ import annotations

import dis
import functools
from itertools import islice
from types import CodeType

MOST_INSTRUCTIONS = 4_000
DELETES_WITHIN = 32
"""Instructions between loading a container and deleting from it."""


@functools.lru_cache(maxsize=8)
def instructions(code: CodeType) -> list[dis.Instruction]:
    """Its instructions, if they are not too many; without the caches between. Nobody changes the list."""
    return [step for step in islice(dis.get_instructions(code), MOST_INSTRUCTIONS) if step.opname != "CACHE"]


def mentions(code: CodeType, name: str) -> bool:
    """Whether a variable or an attribute of this name occurs in the code."""
    return any(name in names for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))


@functools.lru_cache(maxsize=1024)
def uses_global(code: CodeType, name: str) -> bool:
    """Whether a function uses the global variable of this name, and no local one or an attribute called so."""
    return name in code.co_names and any(
        step.argval == name and step.opname.endswith("_GLOBAL") for step in instructions(code)
    )


def loads(step: dis.Instruction, name: str) -> bool:
    """Whether an instruction reads what goes by this name."""
    return step.opname.startswith("LOAD_") and step.opname != "LOAD_CONST" and names(step, name)


def names(step: dis.Instruction, name: str) -> bool:
    """Whether an instruction is about this name."""
    # Newer Pythons load or store two variables with one instruction.
    return step.argval == name or (type(step.argval) is tuple and name in step.argval)


def adds(step: dis.Instruction) -> bool:
    """Whether an instruction adds two things, or joins two texts."""
    return (step.opname.startswith("BINARY_OP") and step.argrepr in ("+", "+=")) or "_ADD" in step.opname


def argument_of(steps: list[dis.Instruction], place: int, functions: frozenset[str]) -> bool:
    """Whether what is loaded at this place is the first argument of a function with one of these names."""
    for step in reversed(steps[max(0, place - 3) : place]):
        if not step.opname.startswith(("LOAD_", "PUSH_NULL")):
            return False
        if step.opname != "LOAD_CONST" and step.argval in functions:
            return True
    return False


def deletes_from(steps: list[dis.Instruction], place: int, name: str) -> bool:
    """Whether something is deleted from what is loaded at this place, or from an element of it."""
    depth = above(steps[place], name)
    for step in steps[place + 1 : place + 1 + DELETES_WITHIN]:
        depth = depth_after(step, depth)
        if depth < 0 or step.opname.startswith(("STORE_", "POP_TOP")):
            return step.opname.startswith("DELETE_SUBSCR") and depth == -1
    return False


def above(step: dis.Instruction, name: str) -> int:
    """How many values are on the stack above what goes by this name, once the instruction has loaded it."""
    return len(step.argval) - 1 - step.argval.index(name) if type(step.argval) is tuple else 0


def depth_after(step: dis.Instruction, depth: int) -> int:
    """How many values are on the stack after an instruction, where ``depth`` were before."""
    try:
        return depth + dis.stack_effect(step.opcode, step.arg)
    except ValueError:
        return depth  # one that only a debugger puts there
