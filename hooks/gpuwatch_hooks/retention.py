"""Graphs of old steps that are still alive, whatever holds them: a list of losses, a running sum, a hidden state.

A weak reference to the model's output would miss most of these: nobody keeps the output, only something computed from
it. But whatever keeps the loss keeps the graph below it, and with it the node that made the output. A node of the
graph can carry a Python object in its metadata (torch's own anomaly mode does); that object dies with the node, so a
weak reference to it tells whether the graph of that step is still held. Measured here: 0.5 us to put it there, 1.5 us
to tear it down, at one step in four.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import SAMPLE_EVERY, StepClock
from gpuwatch_hooks.pace import DENSE_STEPS

RULE = "leak-graph-retained"
OLD_STEPS = 50
"""Steps after which a graph that is still alive counts: longer than a fill of a few dozen, or a short epoch."""

COUNT_EVERY = 8
"""Looks between two counts while every step is looked at; later every look counts."""

MOST = 512
"""Old graphs followed; a leak beyond that is known to be one."""


class _Mark:
    """Lives as long as the graph node that carries it."""

    __slots__ = ("__weakref__",)


class RetentionProbe:
    """Follows the graphs of sampled steps."""

    def __init__(self, record: RecordWriter, clock: StepClock) -> None:
        self.record = record
        self.clock = clock
        self.recent: deque[tuple[int, weakref.ref[_Mark]]] = deque()
        self.old: list[weakref.ref[_Mark]] = []
        self.held = 0  # old graphs alive at the last count
        self.looks = 0
        self.most = 0  # the highest count before something was let go again
        self.peak = 0
        self.shape = ""
        self._said = False

    def look(self, output: torch.Tensor | None) -> None:
        """Mark this step's graph, and see which of the older ones are still alive."""
        step = self.clock.steps
        new_step = not self.recent or self.recent[-1][0] != step
        if new_step and output is not None and output.grad_fn is not None:
            mark = _Mark()
            metadata: Any = output.grad_fn.metadata
            metadata["gpuwatch"] = mark
            self.recent.append((step, weakref.ref(mark)))
            self.shape = "×".join(map(str, output.shape)) or "scalar"
        while self.recent and self.recent[0][0] < step - OLD_STEPS:
            reference = self.recent.popleft()[1]
            if reference() is not None and len(self.old) < MOST:
                self.old.append(reference)
        self.looks += 1
        if self.looks % COUNT_EVERY == 0 or step >= DENSE_STEPS:
            # Here and not at publish: once the loop has returned its lists are gone, and nothing is left to count.
            self.held = self.alive()

    def alive(self) -> int:
        """Old graphs that are still held, as sampled."""
        self.old = [reference for reference in self.old if reference() is not None]
        count = len(self.old)
        if count * 2 < self.peak:  # let go of: a buffer that is cleared now and then
            self.most = max(self.most, self.peak)
            self.peak = count
        self.peak = max(self.peak, count)
        return count

    def publish(self) -> None:
        """Say how many, in steps; nothing while a buffer fills no further than it did before it was cleared."""
        held = SAMPLE_EVERY * self.held if self.held > 1.5 * self.most else 0
        if held or self._said:
            self._said = True
            self.record.observe(RULE, "", f"the model's output is {self.shape}", held)
