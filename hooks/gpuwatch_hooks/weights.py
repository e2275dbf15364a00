"""How much an object keeps: the tensors and arrays within, each storage counted once and whole."""

from __future__ import annotations

import array
import io
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import islice
from time import thread_time_ns
from typing import Any

import torch

from gpuwatch.interruption import expected
from gpuwatch_hooks import graphs
from gpuwatch_hooks.namespace import OPAQUE
from gpuwatch_hooks.referents import attributes, elements_of_container, length_of, sampled

DEEPEST = 5
MOST_PARTS = 512
"""Parts of the sampled elements of one container that are looked at."""

MOST_NAMED = 64
MOST_OPENED = 8_192
_NO_WEIGHT = (*OPAQUE, type)
BUFFERS = (str, bytes, bytearray, io.BytesIO, io.StringIO, array.array)
_PLAIN = (float, int, complex, *BUFFERS)
_SIZE_OF: dict[type, Callable[[Any], int]] = {base: base.__sizeof__ for base in _PLAIN}
GRAPHS_WEIGHED = 4
"""Elements of a container whose graphs are weighed, the others by these."""


@dataclass
class Weight:
    """Tensors and arrays kept, the bytes of their storages, whether one carries a graph; bytes of all else."""

    tensors: float = 0.0
    pinned_bytes: float = 0.0
    graph: bool = False
    plain_bytes: float = 0.0

    def add(self, other: Weight) -> None:
        """Add what a part keeps."""
        self.tensors += other.tensors
        self.pinned_bytes += other.pinned_bytes
        self.graph = self.graph or other.graph
        self.plain_bytes += other.plain_bytes

    def times(self, factor: float) -> Weight:
        """What so many like it keep."""
        return Weight(self.tensors * factor, self.pinned_bytes * factor, self.graph, self.plain_bytes * factor)


@dataclass
class Scale:
    """Weighs the parts of one container; ``known`` are the identities of parameters, which are meant to be kept."""

    known: Container[int] = ()
    left: int = MOST_PARTS
    storages: set[int] = field(default_factory=set)
    graphs: list[Any] = field(default_factory=list)

    def weigh(self, thing: Any, depth: int = DEEPEST) -> Weight:
        """What this object keeps beyond what has been weighed before."""
        weight = Weight()
        kind = type(thing)
        self.left -= 1
        if self.left < 0 or id(thing) in self.known:
            return weight
        if issubclass(kind, _NO_WEIGHT):
            self._plain(thing, kind, weight)
            return weight
        if issubclass(kind, torch.Tensor):
            self._tensor(thing, weight)
            return weight
        if is_array(kind):
            self._array(thing, weight)
            return weight
        if graphs.is_node(kind):
            self._node(thing, weight)
            weight.tensors = 1
            return weight
        if not depth:
            return weight
        elements = elements_of_container(thing, kind)
        if elements is None:
            named = islice(attributes("", thing, kind, parameters=True), MOST_NAMED)
            weight = self.weigh_all([part for _, part in named], depth - 1)[0]
            weight.plain_bytes += plain_bytes_of_object(thing, kind)
            return weight
        weight, count = self.weigh_all(sampled(elements, thing, kind), depth - 1)
        whole = len(elements) if type(elements) is list else length_of(thing, kind)
        return weight.times(whole / count) if count else weight

    def weigh_all(self, things: list[Any], depth: int = DEEPEST) -> tuple[Weight, int]:
        """What the first of these objects keep together, and how many could be weighed."""
        weight = Weight()
        for count, thing in enumerate(things):
            size_of = _SIZE_OF.get(type(thing))
            if size_of is not None:  # most things are: they are weighed without a call for each
                self.left -= 1
                if id(thing) not in self.storages:
                    self.storages.add(id(thing))
                    weight.plain_bytes += size_of(thing)
                if self.left < 0:
                    return weight, count + 1
                continue
            part = self.weigh(thing, depth)
            if self.left < 0 and count:
                return weight, count
            weight.add(part)
        return weight, len(things)

    def _plain(self, thing: Any, kind: type, weight: Weight) -> None:
        size = plain_bytes(thing, kind)
        if size and id(thing) not in self.storages:
            self.storages.add(id(thing))
            weight.plain_bytes = size

    def _tensor(self, tensor: torch.Tensor, weight: Weight) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            node = tensor.grad_fn
            if node is not None:
                self._node(node, weight)
            weight.tensors = 1
            weight.pinned_bytes = storage_bytes(tensor, self.storages)

    def _node(self, node: Any, weight: Weight) -> None:
        weight.graph = True
        if len(self.graphs) < GRAPHS_WEIGHED:
            self.graphs.append(node)

    def _array(self, view: Any, weight: Weight) -> None:
        tensor, owner = owner_of_array(view)
        if tensor is not None:
            self._tensor(tensor, weight)
            return
        weight.tensors = 1
        if id(owner) not in self.storages:
            self.storages.add(id(owner))
            weight.pinned_bytes = owner.nbytes


def weigh_graph(nodes: list[Any], known: Container[int], storages: set[int], deadline: int) -> float:
    """Bytes that these graphs saved for backward, beyond the storages counted before; parameters left out."""
    total = 0.0
    for node in graphs.walk(nodes, deadline):
        for tensor in graphs.kept_tensors(node):
            with torch._C.DisableTorchFunctionSubclass():
                if id(tensor) not in known and not (tensor.is_leaf and tensor.requires_grad):
                    total += storage_bytes(tensor, storages)
    return total


def graph_nodes(thing: Any, deadline: int) -> Iterator[Any]:
    """The nodes that made the tensors within a container: all of them, not a sample."""
    stack = [(thing, DEEPEST)]
    for _ in range(MOST_OPENED):
        if not stack or thread_time_ns() > deadline:
            return
        item, depth = stack.pop()
        kind = type(item)
        if issubclass(kind, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                node = item.grad_fn
            if node is not None:
                yield node
        elif graphs.is_node(kind):
            yield item
        elif depth and not issubclass(kind, OPAQUE):
            elements = elements_of_container(item, kind)
            parts = elements if elements is not None else (part for _, part in attributes("", item, kind))
            stack.extend((part, depth - 1) for part in islice(parts, MOST_OPENED))


def plain_bytes(thing: Any, kind: type) -> int:
    """Bytes of a text, a number or a buffer; 0 for anything else. Nothing of the user's is asked."""
    size = _SIZE_OF.get(kind)
    if size is None:
        if not issubclass(kind, _PLAIN):
            return 0
        size = next(_SIZE_OF[base] for base in _PLAIN if issubclass(kind, base))
    return size(thing)


def plain_bytes_of_object(thing: Any, kind: type) -> int:
    """Bytes of an object itself and of the texts and numbers among its attributes; of a buffer, its contents."""
    buffer = plain_bytes(thing, kind)
    if buffer:
        return buffer
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return 0
    if type(own) is not dict:
        return 0
    return dict.__sizeof__(own) + sum(plain_bytes(value, type(value)) for value in islice(own.values(), MOST_NAMED))


def is_array(kind: type) -> bool:
    """Whether this is numpy's array."""
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def owner_of_array(view: Any) -> tuple[torch.Tensor | None, Any]:
    """The tensor whose storage a numpy array looks into, or None; and the array that owns the memory otherwise."""
    numpy = sys.modules.get("numpy")
    owner = view
    for _ in range(8):
        base = owner.base
        if issubclass(type(base), torch.Tensor):
            return base, owner
        if numpy is None or not issubclass(type(base), numpy.ndarray):
            break
        owner = base
    return None, owner


def storage_bytes(tensor: torch.Tensor, storages: set[int] | None = None) -> int:
    """Bytes of the storage a tensor keeps, 0 for one counted before or one without a storage of its own."""
    if tensor.device.type == "meta":
        return 0
    try:
        if tensor.layout is torch.sparse_coo:
            return sum(storage_bytes(part, storages) for part in (tensor._indices(), tensor._values()))
        if tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        key = storage._cdata  # not the address: asking for it would copy a storage that is copied on write
        if storages is not None:
            if key in storages:
                return 0
            storages.add(key)
        return storage.nbytes()
    except expected(RuntimeError, NotImplementedError):
        return 0  # a subclass that only wraps others
