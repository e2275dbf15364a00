"""Graphs that only the garbage collector frees: an object in a step's graph refers back to the graph.

A healthy step's graph dies when its loss does. One with a cycle in it (a custom autograd function that stores its
output on ``ctx``) lives on until a collection, and its mark dies *in* that collection, which is what gives it away:
memory saws, and its peak is many steps' worth. Looked for while the first steps are looked at, when every fourth graph
is marked.
"""

from __future__ import annotations

import gc

from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.collector import listener
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.in_use import bytes_in_use
from gpuwatch_hooks.pace import DENSE_STEPS
from gpuwatch_hooks.retention import Followed, RetentionProbe

RULE = "leak-cyclic"
OVERDUE_STEPS = 2
"""Steps after which a healthy graph is gone."""

COLLECTIONS = 2
GRAPHS = 3
"""Collections, and marked graphs freed by them, from which it is no accident."""


class CycleProbe:
    """Looks at the marked graphs before and after each collection."""

    def __init__(self, record: RecordWriter, clock: StepClock, retention: RetentionProbe) -> None:
        self.record = record
        self.clock = clock
        self.retention = retention
        self.overdue: list[Followed] = []
        self.used: int | None = None
        self.collections = 0
        self.graphs = 0
        self.steps = 0
        self.freed_bytes = 0
        self.last_step = 0

        def listen(phase: str, details: dict[str, int]) -> None:
            if self.retention.recent:
                collection(self, phase)

        self._listen = listener(listen)
        gc.callbacks.append(self._listen)

    def stop(self) -> None:
        """Listen no more."""
        if self._listen in gc.callbacks:
            gc.callbacks.remove(self._listen)

    @guarded("cycles")
    def publish(self) -> None:
        """Say what collections freed, in bytes a step."""
        if self.clock.steps > DENSE_STEPS:
            self.stop()
        if self.collections >= COLLECTIONS and self.graphs >= GRAPHS and self.last_step:
            evidence = f"{self.collections} collections freed the graphs of about {self.steps} steps"
            self.record.observe(RULE, "", evidence, self.freed_bytes / self.last_step)


@guarded("cycles")
def collection(probe: CycleProbe, phase: str) -> None:
    """A collection of any generation starts or stops."""
    if phase == "start":
        step = probe.clock.steps
        probe.overdue = [
            marked
            for marked in probe.retention.recent
            if marked.step <= step - OVERDUE_STEPS and marked.mark() is not None
        ]
        probe.used = bytes_in_use() if probe.overdue else None
        return
    freed = [marked for marked in probe.overdue if marked.mark() is None]
    probe.overdue = []
    if freed:
        used = bytes_in_use()
        probe.collections += 1
        probe.graphs += len(freed)
        probe.steps += sum(marked.stands_for for marked in freed)
        probe.last_step = probe.clock.steps
        if used is not None and probe.used is not None:
            probe.freed_bytes += max(0, probe.used - used)
