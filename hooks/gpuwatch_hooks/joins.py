"""A tensor, an array or a text that something is joined to at every step, told by the code that assigns to its name."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from dis import Instruction
from types import CodeType
from typing import Any

from gpuwatch_hooks.bounds import related
from gpuwatch_hooks.bytecode import above, adds, depth_after, instructions, loads, mentions, names

JOINS = frozenset({"cat", "concat", "concatenate", "vstack", "hstack", "append", "pad", "dstack"})
_WRITES = frozenset({"extend", "append", "write", "writelines"})
_ASKED_OF_IT = frozenset({"device", "dtype", "shape", "size"})
JOINED, CUT, NEITHER = "joined", "cut", ""


def joins(name: str, codes: Iterable[CodeType], owner: Any) -> str:
    """Whether code assigns to this identifier what it held before, joined with something, or cuts that off."""
    kinds = {kind for code in related(codes, owner) for kind in _joining(code, name)}
    return CUT if CUT in kinds else JOINED if JOINED in kinds else NEITHER


def writes(name: str, codes: Iterable[CodeType], owner: Any) -> str:
    """Whether code adds to a text or a buffer of this identifier."""
    return JOINED if any(_writing(code, name) for code in related(codes, owner)) else NEITHER


@dataclass
class _Statement:
    """What has been seen of a statement: its stack, and what was done with the name."""

    depth: int = 0
    loaded: bool = False
    joined: bool = False
    whole_cut: bool = False  # its result is a slice
    again: bool = False  # loaded since the last call: to store one of its elements
    whole_loads: int = 0  # those of which no slice is taken
    at: int = -1  # the depth at which it was loaded last

    def see(self, step: Instruction, after: Instruction, name: str) -> None:
        """Take in one instruction."""
        self.depth = depth_after(step, self.depth)
        if "CALL" in step.opname:
            self.again = False
        if loads(step, name):
            self.loaded = self.again = True
            self.at = self.depth - above(step, name)
            self.whole_loads += after.argval not in _ASKED_OF_IT
        elif (step.opname == "BUILD_SLICE" and self.depth == self.at + 1) or (
            step.opname == "BINARY_SLICE" and self.depth == self.at
        ):
            self.whole_loads -= 1
        self.joined = self.joined or (step.opname.startswith("LOAD_") and step.argval in JOINS)
        subscript = step.opname.startswith(("BINARY_SUBSCR", "BINARY_SLICE"))
        self.whole_cut = self.whole_cut or (subscript and self.loaded and self.depth == 1)

    def stores(self, step: Instruction, name: str) -> str:
        """What it does to the name, now that its value is stored."""
        element = step.opname == "STORE_SUBSCR" and self.again
        if not self.loaded or not (element or names(step, name)):
            return NEITHER
        if self.whole_cut or (self.joined and self.whole_loads - element <= 0):
            return CUT  # the first elements of what was joined, or of what it held: it has a limit
        return JOINED if self.joined else NEITHER


@functools.lru_cache(maxsize=512)
def _joining(code: CodeType, name: str) -> tuple[str, ...]:
    if not mentions(code, name):
        return ()
    found = []
    statement = _Statement()
    steps = instructions(code)
    for step, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
        if step.opname.startswith("STORE_"):
            found.append(statement.stores(step, name))
        if step.opname.startswith(("STORE_", "POP_TOP")):
            statement = _Statement()
        else:
            statement.see(step, after, name)
    return tuple(found)


@functools.lru_cache(maxsize=512)
def _writing(code: CodeType, name: str) -> bool:
    if not mentions(code, name):
        return False
    loaded = added = False
    steps = instructions(code)
    for step, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
        if step.opname.startswith("STORE_") and loaded and added and names(step, name):
            return True
        if step.opname.startswith(("STORE_", "POP_TOP")):
            loaded = added = False
            continue
        added = added or adds(step) or step.opname == "BUILD_STRING" or step.argval == "join"
        if loads(step, name):
            loaded = True
            if after.argval in _WRITES:
                return True
    return False
