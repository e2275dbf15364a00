"""What an object refers to, by name: asked of the builtin types' own methods and of dictionaries, never of the object.

Types are looked at with ``type``, contents are read with the builtin containers' own methods, attributes out of the
instance's dictionary and slots. A hostile object is a leaf.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import itertools
import os
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from gpuwatch.interruption import expected
from gpuwatch_hooks.namespace import (
    LEAST_PLAIN_BYTES,
    OPAQUE,
    file_of_module,
    is_own_module,
    keeps_anything,
    local_variables,
)
from gpuwatch_hooks.place import is_foreign

OLDEST, NEWEST = 4, 12
FEW = 64
"""Elements up to which those of a container have names of their own, and all of them are weighed."""

MOST_REFERENTS = 16
MOST_CACHED = 20_000
"""Entries of a functools cache beyond which it is not opened: that would list all of them."""

MOST_BLOCKS = 400
"""Blocks of an ``itertools.tee`` that are counted, of 57 items each."""

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CACHE = functools._lru_cache_wrapper
_WRAPPED = (staticmethod, classmethod)
_SUSPENDED = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FOREIGN_PACKAGES = frozenset({"gpuwatch", "gpuwatch_hooks", "multiprocessing", "threading", "rich"})
_TEE: type = type(itertools.tee(())[0])
_MODULE_OF_CLASS = type.__dict__["__module__"].__get__
_NAMES_OF_CLASS = type.__dict__["__dict__"].__get__


def elements_of_container(thing: Any, kind: type) -> Iterable[Any] | None:
    """The elements of a builtin container (or a subclass), read past any override; None for anything else."""
    for base in (list, tuple, deque, set, frozenset):
        if issubclass(kind, base):
            return base.__iter__(thing) if base.__len__(thing) else ()
    if issubclass(kind, dict):
        return dict.values(thing) if dict.__len__(thing) else ()
    if issubclass(kind, _CACHE):
        return _cached(thing)
    if issubclass(kind, _TEE):
        return _remembered(thing)
    return None


def length_of(thing: Any, kind: type) -> int:
    """How many elements a container has, whatever its class says."""
    for base in (list, tuple, deque, set, frozenset, dict):
        if issubclass(kind, base):
            return base.__len__(thing)
    if issubclass(kind, _CACHE):
        return int(_CACHE.cache_info(thing).currsize)
    return sum(1 for _ in _remembered(thing)) if issubclass(kind, _TEE) else 0


def sampled(elements: Iterable[Any], thing: Any, kind: type) -> list[Any]:
    """The oldest and the newest elements; all of them while there are few."""
    if type(elements) is list:
        thing, kind = elements, list
    for base in (list, tuple):
        if issubclass(kind, base):
            count = base.__len__(thing)
            if count > FEW:
                oldest, newest = slice(0, OLDEST), slice(count - NEWEST, count)
                return [*base.__getitem__(thing, oldest), *base.__getitem__(thing, newest)]
            return list(base.__iter__(thing))
    if issubclass(kind, dict) and _keyed_by_tensors(thing):
        if dict.__len__(thing) <= FEW:
            return list(dict.items(thing))
        return [*islice(dict.items(thing), OLDEST), *islice(reversed(dict.items(thing)), NEWEST)]
    if issubclass(kind, dict) and dict.__len__(thing) > FEW:
        return [*islice(dict.values(thing), OLDEST), *islice(reversed(dict.values(thing)), NEWEST)]
    if issubclass(kind, deque) and deque.__len__(thing) > FEW:
        return [*islice(deque.__iter__(thing), OLDEST), *islice(deque.__reversed__(thing), NEWEST)]
    return list(islice(elements, FEW))


def _keyed_by_tensors(thing: dict[Any, Any]) -> bool:
    """Whether the newest key is a tensor, or a tuple with one: then pairs are what the dictionary keeps."""
    key = next(iter(dict.__reversed__(thing)), None)
    parts = key if type(key) is tuple else (key,)
    return any(issubclass(type(part), torch.Tensor) for part in parts)


def leads_on(thing: Any) -> bool:
    """Whether anything can be behind it: no number, no short text, no empty container."""
    kind = type(thing)
    if kind in (str, bytes):
        return len(thing) >= LEAST_PLAIN_BYTES
    return not issubclass(kind, OPAQUE) and not (kind in (dict, list, tuple, set, OrderedDict) and not thing)


def _cached(thing: Any) -> list[Any]:
    """What a functools cache keeps: results and arguments."""
    if _CACHE.cache_info(thing).currsize > MOST_CACHED:
        return []
    parts = gc.get_referents(thing)
    # Without a limit the results are in the cache's dictionary, with one in links that it refers to.
    own = [part for part in parts if not issubclass(type(part), (*OPAQUE, type, dict, *_FUNCTIONS))]
    inner = next((part for part in parts if type(part) is dict and part is not thing.__dict__), {})
    return [*own, *(pair for pair in list(inner.items()) if type(pair[1]).__name__ != "_lru_list_elem")]


def _remembered(thing: Any) -> Iterator[Any]:
    """What the branches of an ``itertools.tee`` still remember: a chain of blocks."""
    block = thing
    for _ in range(MOST_BLOCKS):
        parts = gc.get_referents(block)
        block = next((part for part in parts if type(part).__name__ == "_tee_dataobject"), None)
        yield from (part for part in parts if part is not block and not issubclass(type(part), (*OPAQUE, type)))
        if block is None:
            return


def attributes(name: str, thing: Any, kind: type, parameters: bool = False) -> Iterator[tuple[str, Any]]:
    """What an object refers to by name: its dictionary and slots, a function's closure, what a C object keeps."""
    if issubclass(kind, type):
        if is_own_module(_MODULE_OF_CLASS(thing)):
            yield from _of_class(thing)
    elif issubclass(kind, (*_FUNCTIONS, *_WRAPPED)):
        yield from _of_function(name, thing, kind)
    elif issubclass(kind, tuple(_SUSPENDED)):
        yield from _of_frame(name, getattr(thing, next(_SUSPENDED[base] for base in _SUSPENDED if base is kind)))
    elif issubclass(kind, types.FrameType):
        yield from _of_frame(name, thing)
    elif issubclass(kind, types.TracebackType):
        yield from _of_traceback(name, thing)
    elif kind is threading.local:
        own = threading.local.__getattribute__(thing, "__dict__")  # the searching thread's part of it
        yield from ((f"{name}.{key}", value) for key, value in list(own.items()))
    elif kind is contextvars.ContextVar:
        try:
            value = thing.get()
        except expected(LookupError):
            return  # it has no value here
        yield f"{name}<ContextVar>", value
    elif kind.__module__ in ("itertools", "functools", "builtins", "_queue") and not issubclass(kind, BaseException):
        for part in gc.get_referents(thing)[:MOST_REFERENTS] if kind.__name__ not in ("object", "super") else ():
            if type(part) is not type:
                yield f"{name}<{kind.__name__}>", part
    elif issubclass(kind, torch.nn.Module) or kind.__module__.partition(".")[0] not in _FOREIGN_PACKAGES:
        if issubclass(kind, BaseException):
            yield from _of_exception(name, thing)
        yield from _of_object(name, thing, kind, parameters)


def parts_of(thing: Any, kind: type) -> list[Any]:
    """What a tuple or an object refers to."""
    if issubclass(kind, tuple):
        return list(tuple.__iter__(thing))
    return [part for _, part in islice(attributes("", thing, kind), MOST_REFERENTS)]


def place_of(thing: Any, kind: type) -> str:
    """Where a function, a generator or a class of the user's is written; empty for anything else."""
    if issubclass(kind, type):
        module = _MODULE_OF_CLASS(thing)
        return f"{file_of_module(module)} (class {thing.__name__})" if is_own_module(module) else ""
    code = thing.__code__ if kind is types.FunctionType else thing.gi_code if kind is types.GeneratorType else None
    if code is None or is_foreign(code.co_filename):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} ({code.co_name})"


def _of_object(name: str, thing: Any, kind: type, parameters: bool) -> Iterator[tuple[str, Any]]:
    module = issubclass(kind, torch.nn.Module)
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        own = {}
    if type(own) is dict:
        for key, value in list(own.items()):
            if not leads_on(value):
                continue
            if module and key in ("_modules", "_buffers", "_parameters") and type(value) is dict:
                if key == "_parameters" and not parameters:  # they are meant to be kept
                    yield from _hooks_of_parameters(name, value)
                else:
                    yield from ((f"{name}.{part}", inner) for part, inner in list(value.items()))
            elif not (kind.__module__ == "logging" and key in ("manager", "lock", "stream")):
                yield f"{name}.{key}", value
    for base in kind.__mro__:
        for key, member in list(vars(base).items()) if "__slots__" in vars(base) else ():
            if type(member) is types.MemberDescriptorType:
                try:
                    yield f"{name}.{key}", member.__get__(thing)
                except AttributeError:
                    continue  # a slot that was never set


def _hooks_of_parameters(name: str, parameters: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, parameter in list(parameters.items()):
        for hooks in _HOOKS_OF_PARAMETERS if issubclass(type(parameter), torch.Tensor) else ():
            with torch._C.DisableTorchFunctionSubclass():
                registered = getattr(parameter, hooks, None)
            if registered:
                yield f"{name}.{key}.{hooks}", registered
        # Attributes that a program gave it: a list of its gradients, an importance.
        own = object.__getattribute__(parameter, "__dict__") if issubclass(type(parameter), torch.Tensor) else {}
        yield from ((f"{name}.{key}.{attribute}", value) for attribute, value in list(own.items()) if leads_on(value))


def _of_class(thing: type) -> Iterator[tuple[str, Any]]:
    for key, value in list(_NAMES_OF_CLASS(thing).items()):
        if key in ("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__dataclass_fields__"):
            continue
        if type(value) is not types.FunctionType or keeps_anything(value):
            yield f"{thing.__name__}.{key}", value


def _of_function(name: str, thing: Any, kind: type) -> Iterator[tuple[str, Any]]:
    if issubclass(kind, functools.partial):
        yield from ((f"{name}.args", thing.args), (f"{name}.keywords", thing.keywords), (f"{name}.func", thing.func))
    elif issubclass(kind, types.MethodType):
        yield f"{name}.__self__", thing.__self__
        yield f"{name}.__func__", thing.__func__
    elif issubclass(kind, _WRAPPED):
        yield name, thing.__func__
    else:
        for variable, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            try:
                yield f"{name}:{variable}", cell.cell_contents
            except expected(ValueError):
                continue  # an empty cell
        # By the parameter's name: it is what the function's code knows them by.
        values = thing.__defaults__ or ()
        own = thing.__code__.co_varnames[: thing.__code__.co_argcount][-len(values) :]
        yield from ((f"{name}.__defaults__:{key}", value) for key, value in zip(own, values, strict=False))
        for key, value in list((thing.__kwdefaults__ or {}).items()):
            yield f"{name}.__kwdefaults__:{key}", value
        for key, value in list(thing.__dict__.items()):
            yield f"{name}.{key}", value


def _of_frame(name: str, frame: types.FrameType | None) -> Iterator[tuple[str, Any]]:
    if frame is not None:
        yield from ((f"{name}:{variable}", value) for variable, value in local_variables(frame))


def _of_traceback(name: str, trace: types.TracebackType | None) -> Iterator[tuple[str, Any]]:
    while trace is not None:
        yield from _of_frame(name, trace.tb_frame)
        trace = trace.tb_next


def _of_exception(name: str, thing: BaseException) -> Iterator[tuple[str, Any]]:
    yield f"{name}.args", BaseException.__getattribute__(thing, "args")
    yield from _of_traceback(f"{name}.__traceback__", BaseException.__getattribute__(thing, "__traceback__"))
    for link in ("__cause__", "__context__"):
        yield f"{name}.{link}", BaseException.__getattribute__(thing, link)
