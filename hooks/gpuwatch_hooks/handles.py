"""Open descriptors and hooks on modules: counted now and then, and followed whether they only ever rise."""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Iterator
from time import thread_time_ns

import torch

from gpuwatch.catalog import OPEN_DESCRIPTORS
from gpuwatch.interruption import expected
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.trend import Trend

DESCRIPTOR_RULE = "leak-fds"
HOOK_RULE = "leak-hooks"

FEWEST_DESCRIPTORS = 16
"""Growth over a window below which nothing is said at all."""

FEWEST_RISES = 3
SETTLE_STEPS = 8
EVERY_STEPS = 8
DENSE_STEPS = 64
LATER_STEPS = 16
SELDOM_STEPS = 256
SLOW_NANOSECONDS = 1_000_000
"""Two counts in a row that take longer: from then on they are taken every :data:`SELDOM_STEPS` steps."""

MOST_MODULES = 20_000
MOST_PLACES = 5

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class HandleProbe:
    """Counts what a process can run out of, or pays for at every call."""

    def __init__(self, record: RecordWriter, clock: StepClock, models: list[weakref.ref[torch.nn.Module]]) -> None:
        self.record = record
        self.clock = clock
        self.models = models
        self.trend = Trend()
        self.rising = False
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.rises: dict[str, int] = {}
        self.said: set[str] = set()
        self._next_hooks = SETTLE_STEPS
        self._slow = 0  # counts in a row that took long

    @guarded("handles")
    def publish(self) -> None:
        """Write how many descriptors are open."""
        count = open_descriptors()
        if count is not None:
            self.record.values[self.record.series(OPEN_DESCRIPTORS.name)] = count

    def step_end(self) -> None:
        """During a look an optimizer has stepped."""
        step = self.clock.steps
        if self.trend.due(step):
            count = open_descriptors()
            if count is not None:
                self.trend.add(step, count)
                self._judge_descriptors(count)
        if step >= self._next_hooks:
            began = thread_time_ns()  # its own work: a busy machine is no reason to count more rarely
            self._count_hooks()
            self._slow = self._slow + 1 if thread_time_ns() - began > SLOW_NANOSECONDS else 0
            slow = self._slow >= 2
            self._next_hooks = step + (SELDOM_STEPS if slow else EVERY_STEPS if step < DENSE_STEPS else LATER_STEPS)

    def _judge_descriptors(self, count: int) -> None:
        grown, steps = self.trend.growth()
        if grown >= FEWEST_DESCRIPTORS:
            self.rising = True
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            evidence = f"{grown / steps:.2g} more a step, {count:,} are open, {limit:,} may be"
            self.record.observe(DESCRIPTOR_RULE, "", evidence, grown)
        elif self.rising:
            self.rising = False
            self.record.observe(DESCRIPTOR_RULE, "", "level again", 0.0)

    def _count_hooks(self) -> None:
        for model in [living for known in self.models if (living := known()) is not None]:
            name = type(model).__name__
            for path, count in hooks_by_module(model):
                self._follow(f"{path or name}", count)

    def _follow(self, path: str, count: int) -> None:
        before = self.last.get(path)
        self.last[path] = count
        if before is None or count < before:
            self.first[path], self.rises[path] = count, 0
            if path in self.said:
                self.said.discard(path)
                self.record.observe(HOOK_RULE, path, "removed again", 0.0)
        elif count > before:
            self.rises[path] += 1
            if self.rises[path] >= FEWEST_RISES and (path in self.said or len(self.said) < MOST_PLACES):
                self.said.add(path)
                self.record.observe(HOOK_RULE, path, f"{count:,} hooks on it now", count - self.first[path])


def open_descriptors() -> int | None:
    """Descriptors this process holds open; None where the system does not list them."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # the listing's own
    except expected(OSError):
        return None


def hooks_by_module(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """How many hooks each module has, those of its own parameters included; modules without any are 0."""
    for number, (path, module) in enumerate(model.named_modules()):
        if number >= MOST_MODULES:
            return
        own = vars(module)
        count = sum(len(own[name]) for name in _HOOKS if own.get(name))
        for parameter in (own.get("_parameters") or {}).values():
            if parameter is not None:
                count += sum(len(hooks) for name in _OF_PARAMETERS if (hooks := getattr(parameter, name, None)))
        yield path, count
