"""What is said of a name that leaks: of which one, what it holds, how fast it grows, and which line fills it."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Container, Iterator, Mapping
from time import thread_time_ns
from typing import Any

from gpuwatch.sizes import size_text
from gpuwatch_hooks.bounds import identifier
from gpuwatch_hooks.namespace import Roots
from gpuwatch_hooks.referents import FEW, elements_of_container, length_of
from gpuwatch_hooks.sites import grown_at
from gpuwatch_hooks.suspects import Known, Point, amounts, rose, rose_tensors
from gpuwatch_hooks.walk import Held, Holding, Key
from gpuwatch_hooks.weights import Scale, weigh_graph

GRAPHS_NANOSECONDS = 5_000_000

Points = Mapping[Key, deque[Point]]


def once(suspects: list[Key], held: Mapping[Key, Held], said: Container[Key]) -> list[Key]:
    """Each object under one of its names: the one that it was told of by, else the first."""
    names: dict[int, Key] = {}
    for key in sorted(suspects, key=lambda key: key not in said):
        names.setdefault(id(held[key].thing), key)
    return [key for key in suspects if names[id(held[key].thing)] == key]


def most_telling(suspects: list[Key], points: Points, held: Mapping[Key, Held]) -> Iterator[tuple[Key, bool]]:
    """Of a container and those within it the inner one where most of the growth is its own, else the outer.

    Each with whether it is the one to tell of. Growth is counted in tensors where both hold any: bytes are of whole
    storages, which many may share.
    """
    parts = {key: few_parts(held[key].thing) for key in suspects}

    def within(key: Key, other: Key) -> bool:
        return is_part(key, other) or id(held[key].thing) in parts[other]

    for key in suspects:
        inner = [ratio(points[other], points[key]) for other in suspects if within(other, key)]
        outer = [ratio(points[key], points[other]) for other in suspects if within(key, other)]
        yield key, not (any(share >= 1 / 2 for share in inner) or any(share < 1 / 2 for share in outer))


def alike(suspects: list[Key], points: Points) -> dict[Key, int]:
    """Of tensors with a graph in one container the first, and how many others there are like it; all other names."""
    like: dict[Key, int] = {}
    firsts: dict[Key, Key] = {}
    for key in suspects:
        container, bracket, _ = key[1].rpartition("[")
        alone = points[key][-1].span is None or not bracket or not key[1].endswith("]")
        first = key if alone else firsts.setdefault((key[0], container), key)
        like[first] = like[first] + 1 if first in like else 0
    return like


def ratio(part: deque[Point], whole: deque[Point]) -> float:
    """The growth of a part, as a share of that of the whole."""
    rises = rose_tensors(part), rose_tensors(whole)
    if min(rises) <= 0:
        rises = rose(part), rose(whole)
    return rises[0] / rises[1] if rises[1] > 0 else 1.0


def is_part(key: Key, of: Key) -> bool:
    """Whether a name is of something within another name."""
    return key[0] == of[0] and key[1].startswith((f"{of[1]}[", f"{of[1]}.", f"{of[1]}<"))


def few_parts(thing: Any) -> set[int]:
    """Identities of what a small container holds: it may have a name of its own elsewhere, ``globals()`` of a cell."""
    kind = type(thing)
    elements = elements_of_container(thing, kind)
    return set() if elements is None or length_of(thing, kind) > FEW else {id(part) for part in elements}


def growth_text(holding: Holding, points: deque[Point]) -> str:
    """How much a container holds, and how fast it grows."""
    first, last = points[0], points[-1]
    steps = last.step - first.step
    series = amounts(points)
    holder = f"`{holding.name}` ({holding.kind} of {holding.length:,})"
    rise = f"+{(series[-1] - series[0]) / steps:.3g} elements"
    if holding.graph and not holding.pinned_bytes:
        return f"{holder} holds {holding.tensors:,.0f} nodes of graphs, {rise} a step"
    what = f"{holding.tensors:,.0f} tensors / " if holding.tensors and not holding.single else ""
    # Texts and numbers within containers within it are counted by their bytes.
    counted = not holding.single and (holding.tensors or holding.parts == holding.length)
    rise = f"{rise} / " if counted else "+"
    return f"{holder} holds {what}{size_text(holding.pinned_bytes)}, {rise}{size_text(bytes_per_step(points))} a step"


def bytes_per_step(points: deque[Point]) -> float:
    """What a name grew by over all searches that are remembered."""
    return (points[-1].pinned_bytes - points[0].pinned_bytes) / (points[-1].step - points[0].step)


def leak_text(
    holding: Holding, held: Held, points: deque[Point], parameters: Container[int], known: Known, unit: str
) -> str:
    """What is said of it, graphs and the line that fills it included; ``unit`` is what graphs are measured in."""
    scale = Scale(parameters)
    scale.weigh(held.thing)
    nodes, deadline = scale.graphs, thread_time_ns() + GRAPHS_NANOSECONDS
    of_graphs = weigh_graph(nodes, parameters, scale.storages, deadline) if nodes else 0.0
    if holding.reach is not None:
        series, steps = amounts(points), points[-1].step - points[0].step
        per_step = (series[-1] - series[0]) / steps
        text = f"`{holding.name}` carries a graph that goes back {series[-1]:,.0f} {unit}, +{per_step:.3g} a step"
    else:
        of_graphs *= max(1.0, holding.tensors / max(1, len(nodes)))
        text = growth_text(holding, points)
    if of_graphs >= 1024:
        text += f"; the graphs keep about {size_text(of_graphs)} more"
    return text + site_text(holding, known)


def site_text(holding: Holding, known: Known) -> str:
    """The line of the user's that puts something into it, where code tells."""
    site = grown_at(identifier(holding.name), [*known.functions, *known.codes], known.owner)
    return f"; it grows at {site}" if site else ""


def remembering(roots: Roots) -> str:
    """A function on the stack that uses ``itertools.cycle``: no name leads to the iterator of a loop."""
    imported = any(root.name == "cycle" and root.thing is itertools.cycle for root in (*roots.near, *roots.modules))
    for code in roots.codes:
        if "cycle" in code.co_names and (imported or "itertools" in code.co_names):
            place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} ({code.co_name})"
            return f"{place} uses itertools.cycle, which keeps everything that it was given"
    return ""
