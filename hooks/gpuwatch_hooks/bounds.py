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
from types import CodeType, FunctionType
from typing import Any

from gpuwatch_hooks.aliases import other_names
from gpuwatch_hooks.bytecode import argument_of, deletes_from, instructions, loads, mentions, names
from gpuwatch_hooks.namespace import is_own_module

TRIMMED, EMPTIED = "trimmed", "emptied"
_TRIMS = frozenset({"pop", "popleft", "popitem", "remove", "discard"})
_TAKES = frozenset({"heappop", "heapreplace", "heappushpop"})
"""Functions of ``heapq`` that take something out, or put it in instead of something."""

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

FULL = (">", ">=", "==")
ANY = (*FULL, "<", "<=", "!=")
"""Comparisons of a container's length: with what it reaches, and all."""

MOST_CODES = 512
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


def shrinks(name: str, codes: Iterable[CodeType], owner: Any, is_list: bool, functions: Iterable[CodeType] = ()) -> str:
    """Whether code of the user's trims or empties what goes by this identifier; an empty text when none does.

    ``functions`` are others that the code may call, with it as an argument.
    """
    own = list(related(codes, owner))
    kinds = {kind for code in own for kind in _shrinking(code, name, is_list)}
    if TRIMMED in kinds or any(
        TRIMMED in _shrinking(code, alias, is_list) for code, alias in other_names(name, own, functions)
    ):
        return TRIMMED
    # Flushed when it is full.
    flushed = EMPTIED in kinds and any(_length_asked(code, name, FULL) for code in own)
    return TRIMMED if flushed else EMPTIED if EMPTIED in kinds else ""


def has_limit(name: str, codes: Iterable[CodeType], owner: Any, functions: Iterable[CodeType] = ()) -> bool:
    """Whether code that trims it goes by its length: then it ends there, however long that takes to come."""
    own = list(related(codes, owner))
    places = [*((code, name) for code in own), *other_names(name, own, functions)]
    return any(_length_asked(code, alias, ANY) or _cut(code, alias) for code, alias in places)


def trims_itself(thing: Any, is_list: bool) -> bool:
    """Whether a container of a class of the user's own takes elements out in one of its methods."""
    return issubclass(type(thing), (list, dict, set, deque)) and any(
        code.co_argcount and TRIMMED in _shrinking(code, code.co_varnames[0], is_list) for code in related((), thing)
    )


def limits_itself(thing: Any) -> bool:
    """Whether one that does goes by its own length."""
    return any(code.co_argcount and _length_asked(code, code.co_varnames[0], ANY) for code in related((), thing))


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
        if method in _TRIMS or deletes_from(steps, place, name) or argument_of(steps, place, _TAKES):
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


@functools.lru_cache(maxsize=512)
def _length_asked(code: CodeType, name: str, comparisons: tuple[str, ...]) -> bool:
    """Whether something depends on what its length has reached: ``if len(items) >= most``."""
    if "len" not in code.co_names or not mentions(code, name):
        return False
    steps = instructions(code)
    return any(
        any(loads(later, name) for later in ahead) and ahead[-1].argval in comparisons
        for place, step in enumerate(steps)
        if step.argval == "len" and (ahead := _condition(steps, place))
    )


@functools.lru_cache(maxsize=512)
def _cut(code: CodeType, name: str) -> bool:
    """Whether it is cut to a slice of itself, or loses one: ``items = items[-9:]``, ``del items[:-9]``."""
    if not mentions(code, name):
        return False
    steps = instructions(code)
    return any(
        loads(step, name)
        and any("SLICE" in later.opname for later in steps[place + 1 : place + 1 + WITHIN])
        and (deletes_from(steps, place, name) or _stored_back(steps[place + 1 : place + 1 + 3 * WITHIN], name))
        for place, step in enumerate(steps)
    )


def _stored_back(following: list[dis.Instruction], name: str) -> bool:
    ends = (step for step in following if step.opname.startswith(("STORE_", "POP_TOP")))
    return (end := next(ends, None)) is not None and end.opname.startswith("STORE_") and names(end, name)


def _condition(steps: list[dis.Instruction], place: int) -> list[dis.Instruction]:
    """The instructions of a condition from this place on, up to the jump that depends on it; none where there is no."""
    ahead = steps[place + 1 : place + 1 + 3 * WITHIN]
    jump = next((at for at, step in enumerate(ahead) if step.opname.endswith("IF_FALSE")), 0)
    return ahead[:jump]


def _capped(steps: list[dis.Instruction], name: str) -> bool:
    """Whether it grows only where its length was found to be below something: ``if len(items) < most``."""
    for place, step in enumerate(steps):
        if step.argval != "len" or not step.opname.startswith("LOAD_"):
            continue
        ahead = _condition(steps, place)
        if not ahead or "<" not in str(ahead[-1].argval):
            continue
        end = steps[place + 1 + len(ahead)].argval
        if any(loads(later, name) for later in ahead) and _grows_before(steps, place, end, name):
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


def _before_statement_ends(steps: list[dis.Instruction], *wanted: str) -> bool:
    for step in steps:
        if step.opname.startswith(wanted):
            return True
        if step.opname == "POP_TOP" or "CALL" in step.opname or step.opname.startswith("STORE_"):
            return False
    return False
