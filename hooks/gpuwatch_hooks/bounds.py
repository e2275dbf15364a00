"""Where a container's growth may end: a limit it tells of, or code of the user's that takes elements out again.

A container that is still filling looks like a leak. Some tell their limit (``maxlen``, a cache's ``maxsize``, a
``capacity`` on the object that owns it). For others the code decides: one that is *trimmed* somewhere (``pop``,
``popleft``, ``del items[0]``) has a limit of the program's own, one that is *emptied* somewhere (``clear()``, assigned
anew in a loop or in a method) should be empty again once an epoch has ended. Code is only looked at for a name that is
about to be reported, once.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

from gpuwatch_hooks.namespace import is_own_module

TRIMMED, EMPTIED = "trimmed", "emptied"
_TRIMS = frozenset({"pop", "popleft", "popitem", "remove", "discard"})
JOINS = frozenset({"cat", "concat", "concatenate", "vstack", "hstack", "append", "pad", "dstack"})
_CAPACITY = re.compile(
    r"_*([A-Za-z]+__)?(capacity|maxlen|maxsize|max_size|max_items|max_entries|max_length|max_history"
    r"|(buffer|queue|cache|memory|bank|pool|replay|window|history)_size)$"
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_BRACKETS = re.compile(r"\[[^\]]*\]|<[^>]*>|\([^)]*\)")

_INDEXES = frozenset(
    {"LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_CONST", "LOAD_DEREF", "BINARY_SUBSCR", "BINARY_OP"}
)
_ONCE = frozenset({"__init__", "__new__", "__post_init__", "<module>"})
_GROWS = frozenset({"append", "appendleft", "add", "extend", "setdefault"})

MOST_CODES = 512
MOST_INSTRUCTIONS = 4_000
WITHIN = 6
"""Instructions between loading a container and deleting from it, or assigning to one of its elements."""


def limit_of(thing: Any, kind: type, owner: Any) -> int | None:
    """The most elements a container can ever have, where it or its owner tells."""
    if issubclass(kind, deque):
        return deque.__dict__["maxlen"].__get__(thing) if thing.maxlen is not None else _capacity(owner)
    if issubclass(kind, functools._lru_cache_wrapper):
        most: int | None = functools._lru_cache_wrapper.cache_info(thing).maxsize
        return most
    return _capacity(owner)


def _capacity(owner: Any) -> int | None:
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    if type(own) is not dict:
        return None
    known = [value for name, value in list(own.items()) if type(value) is int and value > 0 and _CAPACITY.match(name)]
    return max(known, default=None)


def identifier(name: str) -> str:
    """The variable or attribute that a holder's name ends with: ``values`` of ``meter.values['wide'][3]``."""
    found = _IDENTIFIER.findall(_BRACKETS.sub("", name))
    return found[-1] if found else ""


def shrinks(name: str, codes: Iterable[CodeType], owner: Any, is_list: bool) -> str:
    """Whether code of the user's trims or empties what goes by this identifier; an empty text when none does."""
    kinds = {kind for code in related(codes, owner) for kind in _shrinking(code, name, is_list)}
    return TRIMMED if TRIMMED in kinds else EMPTIED if EMPTIED in kinds else ""


def joins(name: str, codes: Iterable[CodeType], owner: Any) -> bool:
    """Whether code of the user's assigns to this identifier what it held before, joined with something."""
    return any(_joining(code, name) for code in related(codes, owner))


def related(codes: Iterable[CodeType], owner: Any) -> Iterator[CodeType]:
    """All code within these, and in the methods of the owner's class."""
    kind = owner if issubclass(type(owner), type) else type(owner)
    methods = [
        inspect.unwrap(function).__code__
        for base in kind.__mro__
        if is_own_module(base.__module__)
        for function in list(vars(base).values())
        if type(function) is FunctionType
    ]
    seen: set[CodeType] = set()
    pending = [*codes, *methods]
    while pending and len(seen) < MOST_CODES:
        code = pending.pop()
        if code not in seen:
            seen.add(code)
            yield code
            pending.extend(part for part in code.co_consts if type(part) is CodeType)


@functools.lru_cache(maxsize=512)
def _shrinking(code: CodeType, name: str, is_list: bool) -> tuple[str, ...]:
    if not mentions(code, name):
        return ()
    steps = instructions(code)
    found = []
    stores = []
    appended = assigned = loaded = sliced = cut = False
    for place, step in enumerate(steps):
        if step.opname == "STORE_SUBSCR" and cut:
            found.append(TRIMMED)  # one of those within it
        if step.opname.startswith("STORE_") and names(step, name):
            if loaded and sliced:
                found.append(TRIMMED)  # what it held before, but for some
            elif not loaded:
                stores.append(step)
        if step.opname.startswith(("STORE_", "POP_TOP")):
            loaded = sliced = cut = False
        sliced = sliced or "SLICE" in step.opname
        cut = cut or (loaded and "SLICE" in step.opname)
        if not loads(step, name):
            continue
        loaded = True
        following = steps[place + 1 : place + 1 + WITHIN]
        method = _method(following)
        if method in _TRIMS or _before_statement_ends(following, "DELETE_S"):
            found.append(TRIMMED)
        if method == "clear":
            found.append(EMPTIED)
        appended = appended or method == "append"
        assigned = assigned or _before_statement_ends(following, "STORE_SUBSCR", "STORE_SLICE")
    if (is_list and appended and assigned) or _capped(steps, name):
        found.append(TRIMMED)  # a ring, or the first few: appended to until it is full
    if _emptied_by(stores, steps, code):
        found.append(EMPTIED)
    return tuple(found)


def _method(following: list[dis.Instruction]) -> str | None:
    """The method that is called of what was just loaded, or of one of its elements."""
    for step in following:
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            return str(step.argval)
        if step.opname not in _INDEXES:
            return None
    return None


def _emptied_by(stores: list[dis.Instruction], steps: list[dis.Instruction], code: CodeType) -> bool:
    """Whether one of the assignments is another than the first: in a loop, or in a method that is no constructor.

    A module's own code runs once.
    """
    loops = [
        (step.argval, step.offset)
        for step in steps
        if "JUMP" in step.opname and type(step.argval) is int and step.argval < step.offset
    ]
    return any(
        (step.opname == "STORE_ATTR" and code.co_name not in _ONCE)
        or any(first <= step.offset <= last for first, last in loops)
        for step in stores
    )


def _capped(steps: list[dis.Instruction], name: str) -> bool:
    """Whether it grows only where its length was found to be below something: ``if len(items) < most``."""
    for place, step in enumerate(steps):
        if step.argval != "len" or not step.opname.startswith("LOAD_"):
            continue
        ahead = steps[place + 1 : place + 1 + 3 * WITHIN]
        jump = next((at for at, later in enumerate(ahead) if later.opname.endswith("IF_FALSE")), None)
        if jump is None or not jump or "<" not in str(ahead[jump - 1].argval):
            continue
        if any(loads(later, name) for later in ahead[:jump]) and _grows_before(steps, place, ahead[jump].argval, name):
            return True
    return False


def _grows_before(steps: list[dis.Instruction], place: int, end: int, name: str) -> bool:
    """Whether something is put into it from here on, up to this offset."""
    for step, method in zip(steps[place:], steps[place + 1 :], strict=False):
        if step.offset >= end:
            return False
        if loads(step, name) and method.argval in _GROWS:
            return True
    return False


@functools.lru_cache(maxsize=512)
def _joining(code: CodeType, name: str) -> bool:
    if not mentions(code, name) or JOINS.isdisjoint(code.co_names):
        return False
    loaded = joined = False
    for step in instructions(code):
        if step.opname.startswith("STORE_"):
            if loaded and joined and names(step, name):
                return True
            loaded = joined = False
        elif step.opname == "POP_TOP":
            loaded = joined = False
        loaded = loaded or loads(step, name)
        joined = joined or (step.opname.startswith("LOAD_") and step.argval in JOINS)
    return False


def mentions(code: CodeType, name: str) -> bool:
    """Whether a variable or an attribute of this name occurs in the code."""
    return any(name in names for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))


@functools.lru_cache(maxsize=1024)
def uses_global(code: CodeType, name: str) -> bool:
    """Whether a function uses the global variable of this name, and no local one or an attribute called so."""
    return name in code.co_names and any(
        step.argval == name and step.opname.endswith("_GLOBAL") for step in instructions(code)
    )


def instructions(code: CodeType) -> list[dis.Instruction]:
    """Its instructions, if they are not too many; without the caches between."""
    return [step for step in islice(dis.get_instructions(code), MOST_INSTRUCTIONS) if step.opname != "CACHE"]


def loads(step: dis.Instruction, name: str) -> bool:
    """Whether an instruction reads what goes by this name."""
    return step.opname.startswith("LOAD_") and step.opname != "LOAD_CONST" and names(step, name)


def names(step: dis.Instruction, name: str) -> bool:
    """Whether an instruction is about this name."""
    # Newer Pythons load or store two variables with one instruction.
    return step.argval == name or (type(step.argval) is tuple and name in step.argval)


def _before_statement_ends(steps: list[dis.Instruction], *wanted: str) -> bool:
    for step in steps:
        if step.opname.startswith(wanted):
            return True
        if step.opname == "POP_TOP" or "CALL" in step.opname or step.opname.startswith("STORE_"):
            return False
    return False
