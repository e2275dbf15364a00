"""From a name to the tensors it keeps: a bounded walk over containers, objects, closures, hooks and caches.

A container is judged by samples of its oldest and newest elements once it has many, so that its cost does not grow with
its length.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass
from time import thread_time_ns
from types import CodeType, FunctionType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from gpuwatch_hooks import graphs
from gpuwatch_hooks.bounds import limit_of
from gpuwatch_hooks.chains import links
from gpuwatch_hooks.namespace import LEAST_PLAIN_BYTES, OPAQUE, Root
from gpuwatch_hooks.referents import (
    FEW,
    NEWEST,
    OLDEST,
    attributes,
    elements_of_container,
    leads_on,
    length_of,
    parts_of,
    place_of,
    sampled,
)
from gpuwatch_hooks.weights import BUFFERS, Scale, Weight, is_array, owner_of_array, plain_bytes, storage_bytes

MOST_OBJECTS = 20_000
DEEPEST_PATH = 7
BETWEEN_CLOCKS = 16
MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""The machine's memory: a limit at which a container would be larger is none."""

PLAIN_PART_BYTES = 64
"""Bytes of texts and numbers that are counted as a part, in containers within a container."""

NAMED = 16
"""Elements of a list up to which each has a name of its own."""

Key = tuple[str, str]


@dataclass(frozen=True)
class Holding:
    """A name and the tensors behind it; texts and numbers where there are no tensors.

    ``parts`` are the tensors of a container of containers, else its elements. ``pinned_bytes`` counts whole storages,
    a slice's too. ``reach`` is how far back the graph of a single tensor goes. ``limit`` is the most elements the
    container can ever have, where that is known.
    """

    name: str
    kind: str
    place: str
    length: int
    tensors: float
    parts: float
    pinned_bytes: float
    graph: bool
    reach: graphs.Reach | None
    limit: int | None
    single: bool


class Held(NamedTuple):
    """The object behind a holding, for as long as the search lasts."""

    thing: Any
    owner: Any
    function: Any
    in_data_set: bool


class _Place(NamedTuple):
    name: str
    thing: Any
    place: str
    depth: int
    owner: Any  # the object that the name is an attribute of
    function: Any  # whose closure leads there
    in_data_set: bool


class Walk:
    """One search. ``found`` maps (place without the line, name) to what it holds, ``held`` to the object itself."""

    def __init__(self, deadline: int, known: Container[int] = ()) -> None:
        self.deadline = deadline
        self.known = known
        self.found: dict[Key, Holding] = {}
        self.held: dict[Key, Held] = {}
        self.seen: set[int] = set()
        self.oldest: dict[Any, int] = {}  # how far the graphs below these nodes reach
        self.unsure: set[Key] = set()  # names of what was too long to be weighed
        self.complete = True
        self.visited = 0

    def search(self, roots: Iterable[Root]) -> None:
        """Go through all roots, breadth first, until the deadline; a later call goes on after an earlier one."""
        queue = deque(_Place(root.name, root.thing, root.place, 0, None, None, False) for root in roots)
        while queue and self.complete:
            self.visited += 1
            if self.visited > MOST_OBJECTS or (self.visited % BETWEEN_CLOCKS == 0 and thread_time_ns() > self.deadline):
                self.complete = False
                return
            self._visit(queue.popleft(), queue)

    def _visit(self, at: _Place, queue: deque[_Place]) -> None:
        kind = type(at.thing)
        if kind in BUFFERS:
            size = plain_bytes(at.thing, kind)
            if size >= LEAST_PLAIN_BYTES:
                self._single(at, kind.__name__, size, size, None, tensors=0)
        elif issubclass(kind, OPAQUE):
            return
        elif issubclass(kind, torch.Tensor):
            self._tensor(at)
        elif is_array(kind):
            self._array(at)
        elif graphs.is_node(kind):
            self._single(at, kind.__name__, 1, 0, graphs.reach(at.thing, self.deadline, self.oldest))
        elif id(at.thing) not in self.seen:
            self.seen.add(id(at.thing))
            elements = elements_of_container(at.thing, kind)
            if (elements is None or kind is tuple) and self._chain(at, kind):
                return
            if elements is not None:
                self._container(at, kind, elements)
            if at.depth < DEEPEST_PATH:
                queue.extend(self._inner(at, kind, elements))

    def _inner(self, at: _Place, kind: type, elements: Iterable[Any] | None) -> list[_Place]:
        named: Iterable[tuple[str, Any]]
        owner, function = at.owner, at.function
        if elements is None:
            # Millions of attributes would take as long to list as they are many.
            named = itertools.islice(attributes(at.name, at.thing, kind), MOST_OBJECTS)
            owner = at.thing
            function = at.thing if kind in (FunctionType, GeneratorType) else function
        elif issubclass(kind, dict):
            if dict.__len__(at.thing) > FEW:
                return []
            keys = list(dict.items(at.thing))
            named = [(f"{at.name}[{key!r}]", value) for key, value in keys if type(key) in (str, int)]
        elif issubclass(kind, (list, tuple, deque)) and length_of(at.thing, kind) <= NAMED:
            named = [(f"{at.name}[{number}]", part) for number, part in enumerate(list(elements))]
        else:
            return []
        place = place_of(at.thing, kind) or at.place
        inside = at.in_data_set or issubclass(kind, Dataset)
        deeper = at.depth + 1
        return [_Place(name, part, place, deeper, owner, function, inside) for name, part in named if leads_on(part)]

    def _container(self, at: _Place, kind: type, elements: Iterable[Any]) -> None:
        inner = sampled(elements, at.thing, kind)
        weight, count = Scale(self.known).weigh_all(inner)
        if not weight.tensors and not weight.plain_bytes:
            return
        length = length_of(at.thing, kind)
        weight = weight.times((len(elements) if type(elements) is list else length) / count)
        # What is in objects is followed by their attributes' names, what is in containers within this one by its parts.
        values = (
            part[1] if issubclass(kind, dict) and type(part) is tuple and len(part) == 2 else part for part in inner
        )
        nested = any(issubclass(type(value), (list, dict, deque, set)) for value in values)
        limit = limit_of(at.thing, kind, at.owner)
        if limit is not None and limit * weight.pinned_bytes > length * MEMORY_BYTES:
            limit = None  # memory ends before it does
        self._weighed(at, kind.__name__.strip("_"), length, weight, nested, limit)

    def _weighed(self, at: _Place, kind: str, length: int, weight: Weight, nested: bool, limit: int | None) -> None:
        """Note a container: by its tensors, or where it has none by its texts and numbers, if these are many."""
        kept = weight.pinned_bytes if weight.tensors else weight.plain_bytes
        if not weight.tensors and kept < LEAST_PLAIN_BYTES:
            return
        parts = float(length) if not nested else weight.tensors or kept / PLAIN_PART_BYTES
        holding = Holding(
            at.name, kind, at.place, length, weight.tensors, parts, kept, weight.graph, None, limit, False
        )
        self._add(at, holding)

    def _chain(self, at: _Place, kind: type) -> bool:
        """Whether this is a linked list; one that is too long to come to its end stays what it was."""
        chain, whole = links(at.thing, kind, self.deadline)
        if not chain:
            return False
        self.seen.update(map(id, chain))
        if not whole:
            self.unsure.add(self._key(at))
            return True
        some = chain if len(chain) <= FEW else [*chain[:NEWEST], *chain[-OLDEST:]]
        inside = {id(link) for link in chain}
        parts = [part for link in some for part in parts_of(link, kind) if id(part) not in inside]
        weight, _ = Scale(self.known).weigh_all(parts)
        self._weighed(at, f"chain of {kind.__name__}", len(chain), weight.times(len(chain) / len(some)), False, None)
        return True

    def _tensor(self, at: _Place) -> None:
        tensor = at.thing
        if id(tensor) in self.known:
            return
        with torch._C.DisableTorchFunctionSubclass():
            node = tensor.grad_fn
            reach = None if node is None else graphs.reach(node, self.deadline, self.oldest)
            size = storage_bytes(tensor)
            length = int(tensor.shape[0]) if size and tensor.dim() else 1
        self._single(at, type(tensor).__name__, length, size, reach)

    def _array(self, at: _Place) -> None:
        tensor, owner = owner_of_array(at.thing)
        if tensor is None:
            self._single(at, "ndarray", int(owner.shape[0]) if owner.ndim else 1, owner.nbytes, None)

    def _single(
        self, at: _Place, kind: str, length: int, size: int, reach: graphs.Reach | None, tensors: int = 1
    ) -> None:
        self._add(at, Holding(at.name, kind, at.place, length, tensors, 1, size, reach is not None, reach, None, True))

    def _add(self, at: _Place, holding: Holding) -> None:
        key = self._key(at)
        if key not in self.found:
            self.found[key] = holding
            self.held[key] = Held(at.thing, at.owner, at.function, at.in_data_set)

    def _key(self, at: _Place) -> Key:
        file, _, scope = at.place.partition(" ")
        return file.partition(":")[0] + scope, at.name


def code_of(function: Any) -> list[CodeType]:
    """The code of a function or a generator that a walk came through."""
    kind = type(function)
    return [function.__code__] if kind is FunctionType else [function.gi_code] if kind is GeneratorType else []
