"""Graphs of old steps that are still alive, whatever holds them: a list of losses, a running sum, a hidden state.

A weak reference to the model's output would miss most of these: nobody keeps the output, only something computed from
it. But whatever keeps the loss keeps the graph below it, and with it the nodes that made the output. A node of the
graph can carry a Python object in its metadata (torch's own anomaly mode does); that object dies with the node, so a
weak reference to it tells whether the graph of that step is still held. Measured here: 0.5 us to put it there, 1.5 us
to tear it down.

A hidden state that a model carries on is not computed from its output: it hangs further down. So a few nodes below the
outputs carry the mark too.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpuwatch.limits import KEPT_GRAPHS
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.graphs import number_of
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.pace import DENSE_STEPS, LOOK_EVERY

RULE = "leak-graph-retained"
OLD_STEPS = 50
"""Steps after which a graph that is still alive counts: longer than a fill of a few dozen, or a short epoch."""

SUSPICIOUS_STEPS = 30
"""Steps after which a living graph is worth more looks."""

FEWEST_GRAPHS = 3
"""Marked graphs that must be alive: a single one may be the best step's, kept on purpose."""

COUNT_EVERY = 8
"""Looks between two counts while every step is looked at; later every look counts."""

MOST_NODES = 12
"""Nodes of a step's graph that carry its mark."""

MOST = 512
"""Old graphs followed; a leak beyond that is known to be one."""

MOST_NUMBERS = 1_024
"""Steps whose nodes' numbers are remembered."""

MOST_BELOW = 64
"""Nodes below a kept tensor among which its step's mark is looked for."""

HURRIED_LOOKS = 24
"""Looks that may be asked for, besides one in 128 steps: a loop that keeps graphs for a while is no leak."""


class _Mark:
    """Lives as long as a graph node that carries it."""

    __slots__ = ("__weakref__",)


@dataclass
class Followed:
    """A step whose graph is followed, and how many steps it stands for."""

    step: int
    stands_for: int
    mark: weakref.ref[_Mark]


class RetentionProbe:
    """Follows the graphs of sampled steps."""

    def __init__(self, record: RecordWriter, clock: StepClock) -> None:
        self.record = record
        self.clock = clock
        self.recent: deque[Followed] = deque()
        self.old: list[Followed] = []
        self.held = 0  # old graphs alive at the last count, in steps
        self.named = 0  # the steps whose graphs a holder has that is told of by name
        self.looks = 0
        self.most = 0  # the highest count before something was let go again
        self.peak = 0
        self.shape = ""
        self.excused: weakref.WeakSet[_Mark] = weakref.WeakSet()  # held by something that is known to be bounded
        self.asking = False  # old graphs are alive, and nobody has looked yet what holds them
        self.numbers: deque[tuple[int, int]] = deque(maxlen=MOST_NUMBERS)
        self._last = 0  # the last step that was marked
        self._hurried = 0
        self._said = False
        self._explained = False

    def look(self, outputs: list[torch.Tensor]) -> None:
        """Mark this step's graph, and see which of the older ones are still alive."""
        step = self.clock.steps
        if outputs:
            self._mark(step, outputs)
        while self.recent and self.recent[0].step < step - OLD_STEPS:
            marked = self.recent.popleft()
            if marked.mark() is not None and len(self.old) < MOST:
                self.old.append(marked)
        self.looks += 1
        if self.looks % COUNT_EVERY == 0 or step >= DENSE_STEPS:
            # Here and not at publish: once the loop has returned its lists are gone, and nothing is left to count.
            count = self.alive()
            self.asking = count > 0 and not self._said
            if not (self._explained and self.asking):
                self.held = count

    def explained(self, marks: Iterable[_Mark]) -> None:
        """A search found these graphs in containers that are bounded; the others are held by something else."""
        self.excused.update(marks)
        self.asking = False
        self.held = self.alive()
        self._explained = self.held == 0

    def step_of(self, number: int) -> int:
        """The step in which a graph's node was made, by its number; as exact as steps were looked at."""
        at = bisect.bisect_left(self.numbers, (number, 0))
        # What is newer than the last marked step was made since, up to now.
        return self.numbers[at][1] if at < len(self.numbers) else self.clock.steps

    def _mark(self, step: int, outputs: list[torch.Tensor]) -> None:
        marked = self.recent[-1] if self.recent and self.recent[-1].step == step else None
        mark = None if marked is None else marked.mark()
        if mark is None:
            mark = _Mark()
            # The first forward of the step, or one after it whose graph is gone (a generator's output, detached).
            if marked is not None:
                marked.mark = weakref.ref(mark)
            else:
                self.recent.append(Followed(step, max(1, step - self._last), weakref.ref(mark)))
                self._last = step
            self.numbers.append((number_of(outputs[0].grad_fn), step))
            self.shape = "×".join(map(str, outputs[0].shape)) or "scalar"
        for node in nodes_of(outputs):
            node.metadata["gpuwatch"] = mark

    def alive(self) -> int:
        """Steps whose graphs are old and still held, as sampled; 0 while too few of them were marked to tell."""
        self.old = [marked for marked in self.old if marked.mark() is not None]
        living = [marked for marked in self.old if marked.mark() not in self.excused]
        count = sum(marked.stands_for for marked in living)
        if count * 2 < self.peak:  # let go of: a buffer that is cleared now and then
            self.most = max(self.most, self.peak)
            self.peak = count
        self.peak = max(self.peak, count)
        return count if len(living) >= FEWEST_GRAPHS else 0

    def suspicious(self) -> bool:
        """Whether a graph is alive for longer than it should be, and more looks would tell sooner."""
        step = self.clock.steps
        if self._said or self._hurried >= HURRIED_LOOKS + step // 128:
            return False
        followed = (marked.mark() for marked in (*self.recent, *self.old) if marked.step < step - SUSPICIOUS_STEPS)
        living = any(mark is not None and mark not in self.excused for mark in followed)
        self._hurried += living
        return living

    @guarded("retention")
    def publish(self) -> None:
        """Say how many, in steps; nothing while a buffer fills no further than it did before it was cleared.

        Nor where their holder is told of by name: one cause is one finding.
        """
        # Marks are as far apart as looks: two counts of the same buffer differ by that much.
        limit = 1.5 * self.most + LOOK_EVERY if self.most else 0
        held = self.held if self.held > limit and self.named < KEPT_GRAPHS else 0
        if held or self._said:
            self._said = True
            self.record.observe(RULE, "", f"the model's output is {self.shape}", held)


def nodes_of(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The graph's nodes that made the outputs, and some below them; none of a parameter, which outlives its steps."""
    stack: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while stack and len(seen) < MOST_NODES:
        node = stack.pop()
        if node is None or node in seen or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        yield node
        stack.extend(below for below, _ in reversed(node.next_functions))


def marks_below(node: Any) -> Iterator[_Mark]:
    """The mark of the step that a kept tensor belongs to."""
    seen: set[Any] = {node}
    queue = deque(seen)
    while queue and len(seen) < MOST_BELOW:
        below = queue.popleft()
        mark = below.metadata.get("gpuwatch")
        if mark is not None:
            yield mark
            return
        fresh = {inner for inner, _ in below.next_functions if inner is not None} - seen
        seen |= fresh
        queue.extend(fresh)
