"""Large collections of Python objects that a data set holds: where, how many, and where in memory some of them are.

Every Python object carries its reference count, and reading the object writes it. In a worker that was forked the page
is copied then, so a collection that is only read becomes a copy in each worker. Arrays and tensors have one count for
all of their data: they stay shared.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

FEWEST_OBJECTS = 10_000
SAMPLES = 64
"""Elements looked at of each collection."""

MOST_CHILDREN = 8
MOST_ATTRIBUTES = 64
MOST_VISITED = 256
DEEPEST = 4
NARROW = 16
"""Elements of a small collection that are followed."""

FIRST_VALUES = 4096
GC_HEAD_BYTES = 16
SELF_CONTAINED = (str, bytes, int, float, complex, tuple, frozenset)
"""Types whose objects are one piece: ``sys.getsizeof`` is what lies around the count."""

OPAQUE = (torch.Tensor, type, type(sys), type(len), type(lambda: None))
"""Types that are not looked into."""


@dataclass(frozen=True)
class Holding:
    """A collection: its name from the data set on, its length, the bytes of all objects, addresses of some."""

    name: str
    objects: int
    estimated_bytes: float
    addresses: tuple[int, ...]


def holdings(dataset: object) -> list[Holding]:
    """The large collections of a data set, largest first. It reads what it looks at: call it before the fork."""
    found = [
        holding for name, collection in _collections(dataset) if (holding := _sampled(name, collection)) is not None
    ]
    return sorted(found, key=lambda holding: -holding.estimated_bytes)


def _collections(dataset: object) -> Iterator[tuple[str, Any]]:
    waiting = deque([(type(dataset).__name__, dataset, 0)])
    seen: set[int] = set()
    while waiting and len(seen) < MOST_VISITED:
        name, item, depth = waiting.popleft()
        if id(item) in seen or _is(item, (str, bytes, int, float, type(None))):
            continue
        seen.add(id(item))
        if _length(item) >= FEWEST_OBJECTS:
            yield name, item
        elif depth < DEEPEST:
            waiting.extend((label, part, depth + 1) for label, part in _parts(name, item))


def _is(item: object, kinds: tuple[type, ...]) -> bool:
    """``isinstance`` that asks nothing of the item: its ``__class__`` may be the user's."""
    return issubclass(type(item), kinds)


def _length(item: Any) -> int:
    kind = type(item)
    if issubclass(kind, (list, tuple, dict)):
        return int(kind.__len__(item)) if kind.__len__ in (list.__len__, tuple.__len__, dict.__len__) else 0
    return int(item.size) if _is_array(item) and item.dtype == object else 0


def _is_array(item: object) -> bool:
    numpy = sys.modules.get("numpy")  # a program without it has no arrays
    return numpy is not None and issubclass(type(item), numpy.ndarray)


def _parts(name: str, item: Any) -> Iterator[tuple[str, Any]]:
    kind = type(item)
    if issubclass(kind, dict):
        for key, value in itertools.islice(dict.items(item), NARROW):
            yield f"{name}[{key!r}]" if issubclass(type(key), (str, int)) else f"{name}[...]", value
    elif issubclass(kind, (list, tuple)):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(item[:NARROW]))
    elif not issubclass(kind, OPAQUE):
        attributes = list(attributes_of(item).items())[:MOST_ATTRIBUTES]
        yield from ((f"{name}.{label}", part) for label, part in attributes)


def attributes_of(item: object) -> dict[str, object]:
    """An object's own dictionary, by no way that is the user's; empty where it has none."""
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def _sampled(name: str, collection: Any) -> Holding | None:
    count = _length(collection)
    elements = list(_some(collection, count))
    if not elements:
        return None
    sizes: dict[int, int] = {}  # each object once: what all elements share is no copy of each
    for element in elements:
        sizes.setdefault(id(element), _size(element))
        for child in itertools.islice(_children(element), MOST_CHILDREN):
            sizes.setdefault(id(child), _size(child))
    total = sum(sizes.values()) / len(elements) * count
    kind = "array of objects" if _is_array(collection) else type(collection).__name__
    return Holding(f"{name} ({kind})", count, total, tuple(sizes))


def _some(collection: Any, count: int) -> Iterable[object]:
    stride = max(1, count // SAMPLES)
    kind = type(collection)
    if issubclass(kind, dict):
        return itertools.islice(dict.values(collection), 0, FIRST_VALUES, FIRST_VALUES // SAMPLES)
    if _is_array(collection):
        return (collection.flat[index] for index in range(0, count, stride))
    get = list.__getitem__ if issubclass(kind, list) else tuple.__getitem__
    return (get(collection, index) for index in range(0, count, stride))


def _children(element: Any) -> Iterator[object]:
    kind = type(element)
    if issubclass(kind, dict):
        return iter(dict.values(element))
    if issubclass(kind, (list, tuple)):
        return iter(element[:MOST_CHILDREN])
    return iter(()) if issubclass(kind, OPAQUE) else iter(attributes_of(element).values())


def _size(item: Any) -> int:
    """Bytes around an object's count that lie in one piece: no table of a dict, no data of an array."""
    kind = type(item)
    if kind in SELF_CONTAINED:
        return sys.getsizeof(item)
    return kind.__basicsize__ + GC_HEAD_BYTES
