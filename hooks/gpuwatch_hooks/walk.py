"""From a name to the tensors it keeps: a bounded walk over containers, objects, closures and hooks.

The walk asks objects nothing that their class could answer: types are looked at with ``type``, contents are read with
the builtin containers' own methods, attributes out of the instance's dictionary. A hostile object is a leaf.

A container is judged by samples of its oldest and newest elements, so that its cost does not grow with its length.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from time import thread_time_ns
from typing import Any

import torch

from gpuwatch_hooks.namespace import Root

MOST_OBJECTS = 20_000
MOST_NODES = 2_000
MOST_PARTS = 256
"""Parts of the sampled elements of one container that are looked at."""

DEEPEST_PATH = 7
NAMESPACE_SIZE = 64
"""Dictionaries up to this size with text keys are namespaces: each entry has a name of its own."""

OLDEST, NEWEST = 4, 12
FEW = 16
"""Elements up to which those of a list have names of their own."""

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True)
class Holding:
    """A name and the tensors behind it.

    ``pinned_bytes`` counts whole storages, a slice's too; ``nodes`` is the size of the graph of a single tensor.
    ``limit`` is the most elements the container can ever have, where that is known.
    """

    name: str
    kind: str
    place: str
    length: int
    tensors: float
    pinned_bytes: float
    graph: bool
    nodes: int
    limit: int | None


class Walk:
    """One search. ``found`` maps (place without the line, name) to what it holds."""

    def __init__(self, deadline: int) -> None:
        self.deadline = deadline
        self.found: dict[tuple[str, str], Holding] = {}
        self.seen: set[int] = set()
        self.complete = True
        self.visited = 0

    def search(self, roots: Iterable[Root]) -> None:
        """Go through all roots, breadth first, until the deadline; a later call goes on after an earlier one."""
        queue: deque[tuple[str, Any, str, int]] = deque((root.name, root.thing, root.place, 0) for root in roots)
        while queue and self.complete:
            self.visited += 1
            if self.visited > MOST_OBJECTS or (self.visited % 64 == 0 and thread_time_ns() > self.deadline):
                self.complete = False
                return
            name, thing, place, depth = queue.popleft()
            kind = type(thing)
            if issubclass(kind, _OPAQUE):
                continue
            if issubclass(kind, torch.Tensor):
                self._single(name, thing, place)
                continue
            if id(thing) in self.seen:
                continue
            self.seen.add(id(thing))
            if depth < DEEPEST_PATH:
                queue.extend((part, inner, place, depth + 1) for part, inner in self._parts(name, thing, kind, place))

    def _parts(self, name: str, thing: Any, kind: type, place: str) -> list[tuple[str, Any]]:
        elements = elements_of_container(thing, kind)
        if elements is None:
            return list(attributes(name, thing, kind))
        if not elements:
            return []
        samples = sampled(elements, thing, kind)
        effort = Effort(MOST_PARTS)
        sizes = [size_of(sample, set(), effort) for sample in samples]
        if not issubclass(kind, torch.nn.Module) and any(size.tensors for size in sizes):
            self._container(name, thing, kind, place, sizes)
        if issubclass(kind, dict):
            if dict.__len__(thing) <= NAMESPACE_SIZE:
                return [
                    (f"{name}[{key!r}]", value) for key, value in list(dict.items(thing)) if type(key) in (str, int)
                ]
        elif len(samples) <= FEW:
            return [(f"{name}[{number}]", sample) for number, sample in enumerate(samples)]
        return []

    def _container(self, name: str, thing: Any, kind: type, place: str, sizes: list[Size]) -> None:
        count = len(thing)
        tensors = sum(size.tensors for size in sizes) / len(sizes)
        pinned = sum(size.pinned_bytes for size in sizes) / len(sizes)
        limit = thing.maxlen if issubclass(kind, deque) else None
        graph = any(size.graph for size in sizes)
        self._add(Holding(name, kind.__name__, place, count, count * tensors, count * pinned, graph, 0, limit))

    def _single(self, name: str, tensor: torch.Tensor, place: str) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            node = tensor.grad_fn
            if node is not None:
                nodes = graph_size(node)
                self._add(Holding(name, type(tensor).__name__, place, 1, 1, storage_bytes(tensor), True, nodes, None))

    def _add(self, holding: Holding) -> None:
        file, _, scope = holding.place.partition(" ")
        self.found.setdefault((file.partition(":")[0] + scope, holding.name), holding)


@dataclass
class Size:
    """What one element keeps."""

    tensors: int = 0
    pinned_bytes: int = 0
    graph: bool = False


@dataclass
class Effort:
    """How many more parts may be looked at."""

    left: int


def size_of(thing: Any, storages: set[int], effort: Effort, depth: int = 3) -> Size:
    """Tensors within an element, each storage counted once."""
    size = Size()
    kind = type(thing)
    effort.left -= 1
    if effort.left < 0 or issubclass(kind, _OPAQUE):
        return size
    if issubclass(kind, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            size.graph = thing.grad_fn is not None
            size.tensors = 1
            size.pinned_bytes = storage_bytes(thing, storages)
        return size
    array = tensor_behind_array(thing, kind)
    if array is not None:
        return size_of(array, storages, effort, depth)
    if depth:
        elements = elements_of_container(thing, kind)
        named = attributes("", thing, kind) if elements is None else ()
        inner = sampled(elements, thing, kind) if elements is not None else [part for _, part in named]
        for part in inner[:NAMESPACE_SIZE]:
            of_part = size_of(part, storages, effort, depth - 1)
            size.tensors += of_part.tensors
            size.pinned_bytes += of_part.pinned_bytes
            size.graph = size.graph or of_part.graph
    return size


def elements_of_container(thing: Any, kind: type) -> Iterable[Any] | None:
    """The elements of a builtin container (or a subclass), read past any override; None for anything else."""
    for base in (list, tuple, deque, set, frozenset):
        if issubclass(kind, base):
            return base.__iter__(thing) if base.__len__(thing) else ()
    if issubclass(kind, dict):
        return dict.values(thing) if dict.__len__(thing) else ()
    return None


def sampled(elements: Iterable[Any], thing: Any, kind: type) -> list[Any]:
    """The oldest and the newest elements; all of them while there are few."""
    for base in (list, tuple):
        if issubclass(kind, base):
            count = base.__len__(thing)
            if count > OLDEST + NEWEST:
                oldest, newest = slice(0, OLDEST), slice(count - NEWEST, count)
                return [*base.__getitem__(thing, oldest), *base.__getitem__(thing, newest)]
            return list(base.__iter__(thing))
    if issubclass(kind, dict):
        older = max(0, min(OLDEST, dict.__len__(thing) - NEWEST))
        return [*islice(reversed(dict.values(thing)), NEWEST), *islice(dict.values(thing), older)]
    if issubclass(kind, deque):
        older = max(0, min(OLDEST, deque.__len__(thing) - NEWEST))
        return [*islice(deque.__reversed__(thing), NEWEST), *islice(deque.__iter__(thing), older)]
    return list(islice(elements, OLDEST + NEWEST))


def attributes(name: str, thing: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """What an object refers to by name: its dictionary and slots, a function's closure, what a C object keeps."""
    if issubclass(kind, _FUNCTIONS):
        yield from _of_function(name, thing, kind)
        return
    if issubclass(kind, BaseException):
        yield from _of_exception(name, thing)
    if kind.__module__ in ("itertools", "functools", "builtins") and kind.__name__ not in ("object", "super", "frame"):
        for number, part in enumerate(gc.get_referents(thing)[:16]):
            yield f"{name}<{kind.__name__}>[{number}]", part
        return
    module = issubclass(kind, torch.nn.Module)
    if not module and kind.__module__.partition(".")[0] in _FOREIGN_PACKAGES:
        return
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        own = {}
    if type(own) is dict:
        for key, value in list(own.items()):
            if module and key in ("_parameters", "_non_persistent_buffers_set"):
                continue  # they are meant to be kept
            if module and key in ("_modules", "_buffers") and type(value) is dict:
                yield from ((f"{name}.{part}", inner) for part, inner in list(value.items()))
            else:
                yield f"{name}.{key}", value
    for base in kind.__mro__:
        for key, member in list(vars(base).items()):
            if type(member) is types.MemberDescriptorType and base.__module__ not in _FOREIGN_PACKAGES:
                try:
                    yield f"{name}.{key}", member.__get__(thing)
                except AttributeError:
                    continue  # a slot that was never set


def _of_function(name: str, thing: Any, kind: type) -> Iterator[tuple[str, Any]]:
    if issubclass(kind, functools.partial):
        yield from ((f"{name}.args", thing.args), (f"{name}.keywords", thing.keywords), (f"{name}.func", thing.func))
    elif issubclass(kind, types.MethodType):
        yield f"{name}.__self__", thing.__self__
    else:
        for variable, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            try:
                yield f"{name}:{variable}", cell.cell_contents
            except ValueError:
                continue  # an empty cell
        if thing.__defaults__:
            yield f"{name}.__defaults__", thing.__defaults__


def _of_exception(name: str, thing: BaseException) -> Iterator[tuple[str, Any]]:
    from gpuwatch_hooks.namespace import local_variables

    trace = thing.__traceback__
    while trace is not None:
        for variable, value in local_variables(trace.tb_frame):
            yield f"{name}.__traceback__:{variable}", value
        trace = trace.tb_next


def tensor_behind_array(thing: Any, kind: type) -> torch.Tensor | None:
    """The tensor whose storage a numpy array looks into, or None."""
    if kind.__module__ != "numpy" or kind.__name__ != "ndarray":
        return None
    numpy = sys.modules.get("numpy")
    base = thing
    for _ in range(8):
        if numpy is None or base is None or issubclass(type(base), torch.Tensor):
            break
        base = base.base if issubclass(type(base), numpy.ndarray) else None
    return base if issubclass(type(base), torch.Tensor) else None


def storage_bytes(tensor: torch.Tensor, storages: set[int] | None = None) -> int:
    """Bytes of the storage a tensor keeps, 0 for one counted before or one without a storage of its own."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return 0
    storage = tensor.untyped_storage()
    key = storage._cdata  # not the address: asking for it would copy a storage that is copied on write
    if storages is not None:
        if key in storages:
            return 0
        storages.add(key)
    return storage.nbytes()


def graph_size(node: Any) -> int:
    """Nodes of a graph, counted up to a limit."""
    seen = {id(node)}
    kept = [node]  # the wrappers must live, or their identities are given out again
    queue = deque(kept)
    while queue and len(seen) < MOST_NODES:
        for inner, _ in queue.popleft().next_functions:
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                kept.append(inner)
                queue.append(inner)
    return len(seen)


_FOREIGN_PACKAGES = frozenset(
    {"torch", "gpuwatch", "gpuwatch_hooks", "multiprocessing", "threading", "logging", "rich"}
)
