"""What a tensor's graph reaches back to, and which bytes it keeps: bounded walks that run nothing of the user's.

A graph that is carried on from step to step is told from a large one by its age: nodes are numbered as they are made,
so the lowest number that is reached tells from which step on a graph has been growing. The walk takes the oldest nodes
first, which leads it straight back along a running sum or a hidden state.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from time import thread_time_ns
from typing import Any, cast

import torch

from gpuwatch.interruption import expected

MOST_NODES = 2_000
NODES_BETWEEN_CLOCKS = 64

_NO_NUMBER = (1 << 64) - 1
"""The number of a node that gathers a parameter's gradient."""


_NAMES_OF_CLASS = type.__dict__["__dict__"].__get__


def is_node(kind: type) -> bool:
    """Whether this is the type of a graph's node: what ``tensor.grad_fn`` is."""
    return issubclass(kind, torch._C._FunctionBase) or "next_functions" in _NAMES_OF_CLASS(kind)


@dataclass(frozen=True)
class Reach:
    """Nodes seen, and the numbers of the newest and the oldest of them; 0 where torch does not tell numbers."""

    nodes: int
    newest: int
    oldest: int


def walk(roots: Iterable[Any], deadline: int, known: Container[Any] = ()) -> Iterator[Any]:
    """The nodes of the graphs below these, the oldest first; none of a parameter, nor those below ``known`` ones."""
    seen: set[Any] = set()  # a node's wrapper must live, or its identity is given out again
    queue: list[tuple[int, int, Any]] = []

    def push(node: Any) -> None:
        if node is not None and node not in seen:
            number = number_of(node)
            if number != _NO_NUMBER:
                seen.add(node)
                heapq.heappush(queue, (number, len(seen), node))

    for root in roots:
        push(root)
    count = 0
    while queue and count < MOST_NODES:
        if count % NODES_BETWEEN_CLOCKS == 0 and thread_time_ns() > deadline:
            return
        _, _, node = heapq.heappop(queue)
        count += 1
        yield node
        for below, _ in node.next_functions if node not in known else ():
            push(below)


def reach(node: Any, deadline: int, known: dict[Any, int]) -> Reach:
    """How far a graph reaches back; ``known`` is how far those did that were asked for before, and gets this one."""
    nodes, oldest = 0, number_of(node)
    for inner in walk([node], deadline, known=known):
        nodes += 1
        oldest = min(oldest, known.get(inner, number_of(inner)))
    known[node] = oldest
    return Reach(nodes, number_of(node), oldest)


def number_of(node: Any) -> int:
    """A node's place in the order in which this thread made them."""
    ask: Callable[[], int] | None = getattr(node, "_sequence_nr", None)
    return 0 if ask is None else ask()


def kept_tensors(node: Any) -> Iterator[torch.Tensor]:
    """What a node saved for backward, read without unpacking it: that would run the user's hooks on saved tensors."""
    for name in _saved_names(cast("Hashable", type(node))):
        try:
            saved = getattr(node, name)
        except expected(RuntimeError):
            continue  # freed
        for item in saved if type(saved) in (tuple, list) else (saved,):
            try:
                tensor = item.data
            except expected(RuntimeError):
                continue  # freed, or changed in place: a parameter
            if issubclass(type(tensor), torch.Tensor):
                yield tensor


@functools.lru_cache(maxsize=1024)
def _saved_names(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
