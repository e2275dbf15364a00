"""Leaks with the name of what holds them: searches at a few steps of a run, compared with each other.

A search goes through what the user's program can name (:mod:`gpuwatch_hooks.walk`). A name is a suspect when what it
holds grew at every search over at least :data:`SPAN_STEPS` steps and never shrank: a buffer that fills up stops
growing, one that is cleared shrinks, and a container with a limit is no suspect before it has reached it.

Searches have a budget by their own measured cost: a first allowance, then a share of the run's time.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from dataclasses import dataclass
from time import monotonic_ns, thread_time_ns
from types import FrameType
from typing import Any

import torch

from gpuwatch.record import RecordWriter
from gpuwatch.sizes import size_text
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.namespace import Root, stack_roots
from gpuwatch_hooks.pace import DENSE_STEPS
from gpuwatch_hooks.walk import Holding, Walk

GRAPH_RULE = "leak-graph-retained"
TENSOR_RULE = "leak-tensors"

FIRST_STEP = 16
EVERY_AT_FIRST = 16
GROWTH_OF_GAP = 1.25
"""While a name grows, each search is due when a quarter more steps have gone by than at the last."""

GROWTH_AT_REST = 2.0
"""The same while nothing grows: a healthy run is searched a dozen times in a million steps."""

ALLOWANCE_NANOSECONDS = 60_000_000
SHARE = 0.005
ONE_SEARCH_NANOSECONDS = 20_000_000
LIBRARIES_NANOSECONDS = 2_000_000
LIBRARIES_EVERY = 2

SPAN_STEPS = 48
SEARCHES = 4
KEPT_POINTS = 12
MOST_SUSPECTS = 16


@dataclass(frozen=True)
class Point:
    """What a name held at a step."""

    step: int
    length: int
    pinned_bytes: float
    nodes: int


class LeakProbe:
    """Searches, compares, and names."""

    def __init__(self, record: RecordWriter, clock: StepClock, models: list[weakref.ref[torch.nn.Module]]) -> None:
        self.record = record
        self.clock = clock
        self.models = models
        self.datasets: list[weakref.ref[Any]] = []
        self.next_step = FIRST_STEP
        self.searches = 0
        self.spent = 0
        self.began = monotonic_ns()
        self.points: dict[tuple[str, str], deque[Point]] = {}
        self.peaks: dict[tuple[str, str], float] = {}  # what a name held before it was cleared
        self.said: dict[tuple[str, str], tuple[str, str]] = {}

    def look(self, frame: FrameType | None) -> None:
        """An optimizer has stepped during a look; ``frame`` is the innermost of the training thread."""
        step = self.clock.steps
        if step < self.next_step:
            return
        if self.spent > ALLOWANCE_NANOSECONDS + SHARE * (monotonic_ns() - self.began):
            return
        began = thread_time_ns()  # its own work: what a busy machine adds is not the search's doing
        walk = Walk(began + ONE_SEARCH_NANOSECONDS)
        own, modules, libraries = stack_roots(frame)
        for roots in (own, self._watched(), modules):
            walk.search(roots)
        # A trainer's frames may lead anywhere: a glance, and not with every search.
        if self.searches % LIBRARIES_EVERY == 0:
            walk.deadline = min(walk.deadline, thread_time_ns() + LIBRARIES_NANOSECONDS)
            walk.search(libraries)
        del own, modules, libraries, roots
        self.searches += 1
        self._compare(step, walk)
        gap = GROWTH_OF_GAP if any(_growing(points) for points in self.points.values()) else GROWTH_AT_REST
        self.next_step = int(max(step + EVERY_AT_FIRST, step * (gap if step >= DENSE_STEPS else 1.0)))
        self.spent += thread_time_ns() - began

    def _watched(self) -> list[Root]:
        living = [thing for known in (*self.models, *self.datasets) if (thing := known()) is not None]
        return [Root(type(thing).__name__, thing, f"{type(thing).__name__} (object)") for thing in living]

    def _compare(self, step: int, walk: Walk) -> None:
        for key, holding in walk.found.items():
            points = self.points.setdefault(key, deque(maxlen=KEPT_POINTS))
            point = Point(step, holding.length, holding.pinned_bytes, holding.nodes)
            if points and _amount(point) < _amount(points[-1]):
                self.peaks[key] = max(self.peaks.get(key, 0.0), _amount(points[-1]))
                points.clear()
            points.append(point)
            if _grows(points) and _unbounded(holding) and _amount(point) > 2 * self.peaks.get(key, 0.0):
                self._say(key, holding, points)
            elif key in self.said:
                self._take_back(key)
        if walk.complete:
            for key in [key for key in self.points if key not in walk.found]:
                del self.points[key]
                if key in self.said:
                    self._take_back(key)

    def _say(self, key: tuple[str, str], holding: Holding, points: deque[Point]) -> None:
        if key not in self.said and len(self.said) >= MOST_SUSPECTS:
            return
        first, last = points[0], points[-1]
        steps = last.step - first.step
        per_step = (_amount(last) - _amount(first)) / steps
        bytes_per_step = (last.pinned_bytes - first.pinned_bytes) / steps
        if holding.nodes:
            what = f"`{holding.name}` carries a graph of {last.nodes:,} nodes, +{per_step:.3g} a step"
        else:
            what = (
                f"`{holding.name}` ({holding.kind} of {holding.length:,}) holds {holding.tensors:,.0f} tensors / "
                f"{size_text(holding.pinned_bytes)}, +{per_step:.3g} elements / {size_text(bytes_per_step)} a step"
            )
        rule = GRAPH_RULE if holding.graph else TENSOR_RULE
        # The graph rule counts steps whose graph is held, the tensor rule bytes a step.
        magnitude = last.step - first.step if holding.graph else bytes_per_step
        # The place stays what it was when first said: it is a label, and a new one would be a new series.
        self.said.setdefault(key, (rule, f"{holding.name} ({holding.kind}) in {holding.place}"))
        self.record.observe(*self.said[key], what, magnitude)

    def _take_back(self, key: tuple[str, str]) -> None:
        rule, where = self.said.pop(key)
        self.record.observe(rule, where, "let go again", 0.0)


def _amount(point: Point) -> float:
    return point.nodes if point.nodes else point.length


def _grows(points: deque[Point]) -> bool:
    """Whether it grew at every search, over enough steps, and not much slower at last than before."""
    if len(points) < SEARCHES or points[-1].step - points[0].step < SPAN_STEPS:
        return False
    amounts = [_amount(point) for point in points]
    if any(later <= earlier for earlier, later in itertools.pairwise(amounts)):
        return False
    whole = (amounts[-1] - amounts[0]) / (points[-1].step - points[0].step)
    last = (amounts[-1] - amounts[-2]) / (points[-1].step - points[-2].step)
    return last >= whole / 3


def _growing(points: deque[Point]) -> bool:
    """Whether it grew at the last two searches: no suspect yet, but worth another look soon."""
    amounts = [_amount(point) for point in points][-3:]
    return len(amounts) == 3 and amounts[0] < amounts[1] < amounts[2]


def _unbounded(holding: Holding) -> bool:
    return holding.limit is None or holding.length > holding.limit
