"""Leaks with the name of what holds them: searches at a few steps of a run, compared with each other.

A search goes through what the user's program can name (:mod:`gpuwatch_hooks.walk`). A name is a suspect when what it
holds grew at every search over at least :data:`SPAN_STEPS` steps and never shrank: a buffer that fills up stops
growing, one that is cleared shrinks, and one that is known to end somewhere (:mod:`gpuwatch_hooks.suspects`) waits.

Searches are due ever more rarely, and sooner when graphs of old steps are alive or memory grows: what holds them may be
bounded, and then nothing is said. Searches have a budget by their own measured cost: a first allowance, then a share of
the run's time.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from time import monotonic_ns, thread_time_ns
from types import CodeType, FrameType
from typing import Any

import torch

from gpuwatch.limits import HOST_GROWTH_BYTES
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.growth import GrowthProbe
from gpuwatch_hooks.guard import log
from gpuwatch_hooks.namespace import Root, Roots, own_codes, passes_through, stack_roots
from gpuwatch_hooks.pace import DENSE_STEPS
from gpuwatch_hooks.retention import RetentionProbe, marks_below
from gpuwatch_hooks.suspects import (
    KEPT_POINTS,
    Known,
    Point,
    Verdict,
    amounts,
    growing,
    judge,
    rose,
    rose_tensors,
    settled,
    shrank,
)
from gpuwatch_hooks.telling import (
    alike,
    bytes_per_step,
    growth_text,
    leak_text,
    most_telling,
    once,
    remembering,
    site_text,
)
from gpuwatch_hooks.walk import Holding, Key, Walk, code_of
from gpuwatch_hooks.weights import graph_nodes

GRAPH_RULE = "leak-graph-retained"
TENSOR_RULE = "leak-tensors"

FIRST_STEP = 16
EVERY_AT_FIRST = 16
GROWTH_OF_GAP = 1.25
"""While a name grows, each search is due when a quarter more steps have gone by than at the last."""

GROWTH_AT_REST = 1.5
"""The same while nothing grows: a healthy run is searched two dozen times in a million steps."""

ASKED_EVERY = 8
"""Steps between two searches that another probe asked for."""

ALLOWANCE_NANOSECONDS = 60_000_000
SHARE = 0.005
ONE_SEARCH_NANOSECONDS = 20_000_000
LIBRARIES_NANOSECONDS = 2_000_000
LIBRARIES_EVERY = 2
ASKED_NANOSECONDS = 5_000_000
LONG_NANOSECONDS = 50_000_000
"""A search that took longer than this, in spite of its deadline, is told of."""

TENSOR_BYTES = 370
"""Host memory of a tensor beyond its elements."""

MOST_NAMES = 4_096
STALE_SEARCHES = 8
"""Searches that did not come to a name, after which it is forgotten."""

MOST_SUSPECTS = 16
MOST_PARAMETERS = 4
NEVER = -2


@dataclass(frozen=True)
class Surroundings:
    """What else a search goes by: epochs begun, identities of parameters, whether batches vary in size."""

    epochs: int = 0
    parameter_ids: frozenset[int] | set[int] = frozenset()
    varying: bool = False


class LeakProbe:
    """Searches, compares, and names."""

    def __init__(
        self,
        record: RecordWriter,
        clock: StepClock,
        models: list[weakref.ref[torch.nn.Module]],
        retention: RetentionProbe,
        growth: GrowthProbe,
    ) -> None:
        self.record = record
        self.clock = clock
        self.models = models
        self.retention = retention
        self.growth = growth
        self.datasets: list[weakref.ref[Any]] = []
        self.next_step = FIRST_STEP
        self.searches = 0
        self.spent = 0
        self.longest = 0
        self.began = monotonic_ns()
        self.points: dict[Key, deque[Point]] = {}
        self.peaks: dict[Key, float] = {}  # what a name held before it was cleared
        self.said: dict[Key, tuple[str, str]] = {}
        self.addresses: dict[int, Key] = {}  # the names of objects at the last search
        self.epoch_steps: int | None = None  # of the last epoch that ended
        self._last_step = 0
        self._thread = 0
        self._codes: set[CodeType] = set()  # on the stack when an optimizer stepped
        self._at_ask = NEVER  # the step of the last ask that came through an iterator of the user's own
        self._epoch_began = 0
        self._epochs = 0

    def look(self, frame: FrameType | None, around: Surroundings) -> None:
        """An optimizer has stepped during a look; ``frame`` is the innermost of the training thread."""
        self._thread = threading.get_ident()
        if not self._codes:
            self._codes = own_codes(frame)
        if self._at_ask < self.clock.steps - 1:  # else it is looked for when the next batch is asked for
            self._search(frame, around)

    def _search(self, frame: FrameType | None, around: Surroundings) -> None:
        step = self.clock.steps
        if around.epochs != self._epochs:
            self.epoch_steps = step - self._epoch_began if self._epochs and step > self._epoch_began else None
            self._epochs, self._epoch_began = around.epochs, step
        asked = (self.retention.asking or self.growth.asking) and step >= self._last_step + ASKED_EVERY
        rising = self.growth.rising and not self.said and step >= self._last_step + EVERY_AT_FIRST
        if (step < self.next_step and not asked and not rising) or (self.searches and step <= self._last_step):
            return
        if self.spent > ALLOWANCE_NANOSECONDS + SHARE * (monotonic_ns() - self.began):
            return
        began = thread_time_ns()  # its own work: what a busy machine adds is not the search's doing
        walk = Walk(began + ONE_SEARCH_NANOSECONDS, around.parameter_ids)
        roots = stack_roots(frame)
        if self._at_ask < step:
            self._codes = own_codes(frame)
        # In this order: of a large program's modules the time may not do for all.
        for some in (roots.own, self._watched(), roots.near, roots.modules):
            walk.search(some)
        # A trainer's frames may lead anywhere: a glance, and not with every search.
        if self.searches % LIBRARIES_EVERY == 0:
            walk.deadline = min(walk.deadline, thread_time_ns() + LIBRARIES_NANOSECONDS)
            walk.search(roots.libraries)
        self.searches += 1
        self._last_step = step
        self._compare(step, walk, roots, around)
        named = [self.points[key] for key, (rule, _) in self.said.items() if rule == GRAPH_RULE]
        self.retention.named = max((points[-1].step - points[0].step for points in named), default=0)
        some = []
        del roots
        soon = any(growing(points) for points in self.points.values())
        gap = GROWTH_OF_GAP if soon else GROWTH_AT_REST
        self.next_step = int(max(step + EVERY_AT_FIRST, step * (gap if step >= DENSE_STEPS else 1.0)))
        self._account(thread_time_ns() - began)

    def asked(self, frame: FrameType | None, around: Surroundings) -> None:
        """The training thread asks for a batch during a look; ``frame`` is its innermost.

        An iterator of the user's own (a generator over the loader, a prefetcher) may have no name but in the ``for``
        statement: its variables can be seen only while it asks. Then the search is made here.
        """
        if threading.get_ident() == self._thread:
            self._at_ask = self.clock.steps if passes_through(frame, self._codes) else NEVER
            if self._at_ask >= 0:
                self._search(frame, around)

    def _account(self, spent: int) -> None:
        self.spent += spent
        if spent > LONG_NANOSECONDS and spent > self.longest:
            log.warning("a search for leaks took %.0f ms at step %d", spent / 1e6, self.clock.steps)
        self.longest = max(self.longest, spent)

    def _watched(self) -> list[Root]:
        models = [model for known in self.models if (model := known()) is not None]
        datasets = [dataset for known in self.datasets if (dataset := known()) is not None]
        return [
            *(root for model in models for root in gradient_with_graph(model)),
            *(Root(type(model).__name__, model, f"{type(model).__name__} (object)") for model in models),
            *(Root(type(dataset).__name__, dataset, f"{type(dataset).__name__} (data set)") for dataset in datasets),
        ]

    def _compare(self, step: int, walk: Walk, roots: Roots, around: Surroundings) -> None:
        self._rename(walk)
        verdicts: dict[Key, Verdict] = {}
        known: dict[Key, Known] = {}
        for key, holding in walk.found.items():
            if key not in self.points and len(self.points) >= MOST_NAMES:
                continue
            points = self.points.setdefault(key, deque(maxlen=KEPT_POINTS))
            point = self._point(step, holding, around)
            if points and settled(points, point):
                points.clear()
            if points and shrank(points[-1], point):
                self.peaks[key] = max(self.peaks.get(key, 0.0), amounts(points)[-1])
                points.clear()
            points.append(point)
            thing, owner, function, in_data_set = walk.held[key]
            codes = [*roots.codes, *code_of(function)]
            known[key] = Known(thing, owner, codes, roots.functions, around.varying, in_data_set, self.epoch_steps)
            verdicts[key] = judge(holding, points, self.peaks.get(key, 0.0), known[key])
        leaking = [key for key, verdict in verdicts.items() if verdict is Verdict.LEAK]
        suspects = once([key for key in leaking if walk.found[key].tensors], walk.held, self.said)
        like = alike(suspects, self.points)
        for key, telling in most_telling(suspects, self.points, walk.held):
            if telling and key in like:
                self._say(key, walk, around, known[key], like[key])
            elif key in self.said:
                self._take_back(key)
        small = [key for key in leaking if not walk.found[key].tensors or self._is_small(key, walk.found[key])]
        self._hint(walk, roots, small, known)
        for key in [key for key in self.said if key in verdicts and key not in suspects]:
            self._take_back(key)
        self._forget(step, walk)
        self._excuse(walk, roots, verdicts)

    def _is_small(self, key: Key, holding: Holding) -> bool:
        """Whether nothing is said of it alone: with others like it memory may grow by more."""
        return not holding.graph and bytes_per_step(self.points[key]) < HOST_GROWTH_BYTES

    def _rename(self, walk: Walk) -> None:
        """What was met under another name at the last search keeps its past: a loop's variable may have it for a while.

        Objects are compared by their addresses. What was made since at the address of one that is gone is as a rule
        smaller, and begins anew.
        """
        for key, held in walk.held.items():
            before = self.addresses.get(id(held.thing))
            if before is not None and before in self.points and before not in walk.found and key not in self.points:
                move(self.points, before, key)
                move(self.peaks, before, key)
                move(self.said, before, key)
        self.addresses = {id(held.thing): key for key, held in walk.held.items()}

    def _point(self, step: int, holding: Holding, around: Surroundings) -> Point:
        span: float | None = None
        if holding.reach is not None:
            reach, retention = holding.reach, self.retention
            known = reach.newest and retention.numbers
            span = retention.step_of(reach.newest) - retention.step_of(reach.oldest) if known else reach.nodes
        size = holding.pinned_bytes
        return Point(step, around.epochs, holding.length, holding.parts, size, span, holding.single, holding.tensors)

    def _hint(self, walk: Walk, roots: Roots, plain: list[Key], known: dict[Key, Known]) -> None:
        """Tell the probe of host memory which texts, numbers or small tensors pile up, and of code that remembers."""
        self.growth.hint, self.growth.holder = remembering(roots), ("", 0.0)
        largest = max(plain, key=lambda key: bytes_per_step(self.points[key]), default=None)
        if largest is not None:
            holding, points = walk.found[largest], self.points[largest]
            text = f"{growth_text(holding, points)} in {holding.place}{site_text(holding, known[largest])}"
            others = len(once(plain, walk.held, ())) - 1
            text += f"; {others} more grow beside it" if others and holding.tensors else ""
            self.growth.holder = text, bytes_per_step(points)

    def _say(self, key: Key, walk: Walk, around: Surroundings, known: Known, others: int) -> None:
        if key not in self.said and len(self.said) >= MOST_SUSPECTS:
            return
        holding, points = walk.found[key], self.points[key]
        unit = "steps" if self.retention.numbers else "operations"
        what = leak_text(holding, walk.held[key], points, around.parameter_ids, known, unit)
        what += f"; so do {others} more beside it" if others else ""
        rule = GRAPH_RULE if holding.graph else TENSOR_RULE
        # The graph rule counts steps whose graph is held, the tensor rule bytes a step.
        magnitude = points[-1].step - points[0].step if holding.graph else bytes_per_step(points)
        # The place stays what it was when first said: it is a label, and a new one would be a new series.
        self.said.setdefault(key, (rule, f"{holding.name} ({holding.kind}) in {holding.place}"))
        self.record.observe(*self.said[key], what, magnitude)

    def _take_back(self, key: Key) -> None:
        rule, where = self.said.pop(key)
        self.record.observe(rule, where, "let go again", 0.0)

    def _forget(self, step: int, walk: Walk) -> None:
        """Names that are gone, and after searches that ran out of time those that were not met for long."""
        stale = self.searches % STALE_SEARCHES == 0
        oldest = min((points[-1].step for points in self.points.values()), default=0) if stale else -1
        for key in [key for key in self.points if key not in walk.found and key not in walk.unsure]:
            if walk.complete or (stale and self.points[key][-1].step <= max(oldest, step - 4 * DENSE_STEPS)):
                del self.points[key]
                self.peaks.pop(key, None) if not walk.complete else None
                if key in self.said:
                    self._take_back(key)

    def _excuse(self, walk: Walk, roots: Roots, verdicts: dict[Key, Verdict]) -> None:
        """Tell the probes that asked what is held by something bounded, or named already."""
        explained = 0.0
        for key, verdict in verdicts.items():
            points, holding = self.points[key], walk.found[key]
            if verdict is Verdict.LEAK and (not holding.tensors or self._is_small(key, holding)):
                continue  # it is told of with what it makes memory grow by
            if verdict is Verdict.BOUNDED and len(points) == 1:
                explained += self.growth.spread(holding.pinned_bytes)  # emptied a while ago
            if verdict is not Verdict.STEADY and len(points) > 1:
                explained += max(0.0, rose(points)) + TENSOR_BYTES * max(0.0, rose_tensors(points))
                if verdict is Verdict.BOUNDED and (holding.graph or (holding.single and holding.tensors)):
                    explained = float("inf")  # what the graphs keep, or what is made of it, is not weighed here
        self.growth.explain(explained)
        if self.retention.asking:
            deadline = thread_time_ns() + ASKED_NANOSECONDS
            bounded = [key for key, verdict in verdicts.items() if verdict is Verdict.BOUNDED]
            held = (walk.held[key].thing for key in bounded if walk.found[key].graph and not walk.found[key].single)
            self.retention.explained(
                mark for thing in held for node in graph_nodes(thing, deadline) for mark in marks_below(node)
            )


def move(facts: dict[Key, Any], before: Key, key: Key) -> None:
    """Know by another name what was known."""
    if before in facts:
        facts[key] = facts.pop(before)


def gradient_with_graph(model: torch.nn.Module) -> list[Root]:
    """A gradient that carries a graph: of ``backward(create_graph=True)``, where it is not set to None afterwards."""
    for path, parameter in itertools.islice(model.named_parameters(), MOST_PARAMETERS):
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
            if gradient is not None and gradient.grad_fn is not None:
                name = type(model).__name__
                return [Root(f"{name}.{path}.grad", gradient, f"{name} (object)")]
    return []
