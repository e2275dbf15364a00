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
import os
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic_ns, thread_time_ns
from types import FrameType
from typing import Any

import torch

from gpuwatch.record import RecordWriter
from gpuwatch.sizes import size_text
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.growth import GrowthProbe
from gpuwatch_hooks.guard import log
from gpuwatch_hooks.namespace import Root, Roots, stack_roots
from gpuwatch_hooks.pace import DENSE_STEPS
from gpuwatch_hooks.retention import RetentionProbe, marks_below
from gpuwatch_hooks.suspects import KEPT_POINTS, Known, Point, Verdict, amounts, growing, judge, rose, shrank
from gpuwatch_hooks.walk import Holding, Key, Walk, code_of
from gpuwatch_hooks.weights import Scale, graph_nodes, weigh_graph

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

MOST_NAMES = 4_096
STALE_SEARCHES = 8
"""Searches that did not come to a name, after which it is forgotten."""

MOST_SUSPECTS = 16


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
        self.epoch_steps: int | None = None  # of the last epoch that ended
        self._last_step = 0
        self._epoch_began = 0
        self._epochs = 0

    def look(self, frame: FrameType | None, around: Surroundings) -> None:
        """An optimizer has stepped during a look; ``frame`` is the innermost of the training thread."""
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
        for some in (roots.own, self._watched(), roots.modules):
            walk.search(some)
        # A trainer's frames may lead anywhere: a glance, and not with every search.
        if self.searches % LIBRARIES_EVERY == 0:
            walk.deadline = min(walk.deadline, thread_time_ns() + LIBRARIES_NANOSECONDS)
            walk.search(roots.libraries)
        self.searches += 1
        self._last_step = step
        self._compare(step, walk, roots, around)
        some = []
        del roots
        soon = any(growing(points) for points in self.points.values())
        gap = GROWTH_OF_GAP if soon else GROWTH_AT_REST
        self.next_step = int(max(step + EVERY_AT_FIRST, step * (gap if step >= DENSE_STEPS else 1.0)))
        self._account(thread_time_ns() - began)

    def _account(self, spent: int) -> None:
        self.spent += spent
        if spent > LONG_NANOSECONDS and spent > self.longest:
            log.warning("a search for leaks took %.0f ms at step %d", spent / 1e6, self.clock.steps)
        self.longest = max(self.longest, spent)

    def _watched(self) -> list[Root]:
        models = [model for known in self.models if (model := known()) is not None]
        datasets = [dataset for known in self.datasets if (dataset := known()) is not None]
        return [
            *(Root(type(model).__name__, model, f"{type(model).__name__} (object)") for model in models),
            *(Root(type(dataset).__name__, dataset, f"{type(dataset).__name__} (data set)") for dataset in datasets),
        ]

    def _compare(self, step: int, walk: Walk, roots: Roots, around: Surroundings) -> None:
        verdicts: dict[Key, Verdict] = {}
        for key, holding in walk.found.items():
            if key not in self.points and len(self.points) >= MOST_NAMES:
                continue
            points = self.points.setdefault(key, deque(maxlen=KEPT_POINTS))
            point = self._point(step, holding, around)
            if points and shrank(points[-1], point):
                self.peaks[key] = max(self.peaks.get(key, 0.0), amounts(points)[-1])
                points.clear()
            points.append(point)
            _, owner, function, in_data_set = walk.held[key]
            known = Known(owner, [*roots.codes, *code_of(function)], around.varying, in_data_set, self.epoch_steps)
            verdicts[key] = judge(holding, points, self.peaks.get(key, 0.0), known)
        suspects = [key for key, verdict in verdicts.items() if verdict is Verdict.LEAK]
        for key in self._most_telling(suspects):
            self._say(key, walk, around)
        for key in [key for key in self.said if key in verdicts and key not in suspects]:
            self._take_back(key)
        self._forget(step, walk)
        self._excuse(walk, roots, verdicts)

    def _point(self, step: int, holding: Holding, around: Surroundings) -> Point:
        span: float | None = None
        if holding.reach is not None:
            reach, retention = holding.reach, self.retention
            known = reach.oldest and retention.numbers
            span = retention.step_of(reach.newest) - retention.step_of(reach.oldest) if known else reach.nodes
        size = holding.pinned_bytes
        return Point(step, around.epochs, holding.length, holding.parts, size, span, holding.single)

    def _most_telling(self, suspects: list[Key]) -> Iterator[Key]:
        """Of a container and those within it: the inner one where most of the growth is its own, else the outer."""
        for key in suspects:
            rate = rose(self.points[key])
            inner = [rose(self.points[other]) for other in suspects if is_part(other, key)]
            outer = [rose(self.points[other]) for other in suspects if is_part(key, other)]
            if any(part >= rate / 2 for part in inner) or any(rate < whole / 2 for whole in outer):
                if key in self.said:
                    self._take_back(key)
                continue
            yield key

    def _say(self, key: Key, walk: Walk, around: Surroundings) -> None:
        if key not in self.said and len(self.said) >= MOST_SUSPECTS:
            return
        holding, points = walk.found[key], self.points[key]
        first, last = points[0], points[-1]
        steps = last.step - first.step
        bytes_per_step = (last.pinned_bytes - first.pinned_bytes) / steps
        scale = Scale(around.parameter_ids)
        scale.weigh(walk.held[key].thing)
        nodes, deadline = scale.graphs, thread_time_ns() + ASKED_NANOSECONDS
        of_graphs = weigh_graph(nodes, around.parameter_ids, scale.storages, deadline) if nodes else 0.0
        if holding.reach is not None:
            what = f"`{holding.name}` carries a graph that goes back {last.span:,.0f} steps, +1 a step"
        else:
            of_graphs *= max(1.0, holding.tensors / max(1, len(nodes)))
            series = amounts(points)
            per_step = (series[-1] - series[0]) / steps
            noun = "bytes" if holding.single else "elements"
            what = (
                f"`{holding.name}` ({holding.kind} of {holding.length:,}) holds {holding.tensors:,.0f} tensors / "
                f"{size_text(holding.pinned_bytes)}, +{per_step:.3g} {noun} / {size_text(bytes_per_step)} a step"
            )
        if of_graphs >= 1024:
            what += f"; the graphs keep about {size_text(of_graphs)} more"
        rule = GRAPH_RULE if holding.graph else TENSOR_RULE
        # The graph rule counts steps whose graph is held, the tensor rule bytes a step.
        magnitude = steps if holding.graph else bytes_per_step
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
        for key in [key for key in self.points if key not in walk.found]:
            if walk.complete or (stale and self.points[key][-1].step <= max(oldest, step - 4 * DENSE_STEPS)):
                del self.points[key]
                self.peaks.pop(key, None) if not walk.complete else None
                if key in self.said:
                    self._take_back(key)

    def _excuse(self, walk: Walk, roots: Roots, verdicts: dict[Key, Verdict]) -> None:
        """Tell the probes that asked what is held by something bounded, or named already."""
        explained = 0.0
        for key, verdict in verdicts.items():
            points = self.points[key]
            if verdict is not Verdict.STEADY and len(points) > 1:
                explained += max(0.0, rose(points))
                if walk.found[key].graph and verdict is Verdict.BOUNDED:
                    explained = float("inf")  # what the graphs keep is not weighed here
        self.growth.explain(explained)
        self.growth.hint = remembering(roots)
        if self.retention.asking:
            deadline = thread_time_ns() + ASKED_NANOSECONDS
            bounded = [key for key, verdict in verdicts.items() if verdict is Verdict.BOUNDED]
            held = (walk.held[key].thing for key in bounded if walk.found[key].graph and not walk.found[key].single)
            self.retention.explained(
                mark for thing in held for node in graph_nodes(thing, deadline) for mark in marks_below(node)
            )


def remembering(roots: Roots) -> str:
    """A function on the stack that uses ``itertools.cycle``: no name leads to the iterator of a loop."""
    imported = any(root.name == "cycle" and root.thing is itertools.cycle for root in roots.modules)
    for code in roots.codes:
        if "cycle" in code.co_names and (imported or "itertools" in code.co_names):
            place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} ({code.co_name})"
            return f"{place} uses itertools.cycle, which keeps everything that it was given"
    return ""


def is_part(key: Key, of: Key) -> bool:
    """Whether a name is of something within another name."""
    return key[0] == of[0] and key[1].startswith((f"{of[1]}[", f"{of[1]}.", f"{of[1]}<"))
