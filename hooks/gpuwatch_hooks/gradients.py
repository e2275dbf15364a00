"""What happens to gradients between two optimizer steps: set to None, zeroed in place, or forgotten.

One small parameter per optimizer is watched. Its gradient's version counter is taken down after a step; at the start of
the next backward it tells: no gradient, a changed one (zeroed in place), or the very same (never cleared). Only loops
with one backward per step can be judged: with accumulation, or two networks, a kept gradient is right.
"""

from __future__ import annotations

import weakref

import torch

from gpuwatch.limits import KEPT_STEPS, ZEROED_STEPS
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.guard import guarded

ZEROED_RULE = "opt-zero-grad-inplace"
KEPT_RULE = "opt-grads-not-zeroed"

READ_VALUES_AFTER = KEPT_STEPS - 10
"""Kept gradients in a row after which, on the CPU, their values are read too: `grad.data.zero_()` keeps the version."""

LIMITS = {"zeroed": ZEROED_STEPS, "kept": KEPT_STEPS}
"""Steps in a row beyond which there is no doubt."""

NONE, ZEROED, KEPT = "none", "zeroed", "kept"


class _Sentinel:
    """One optimizer's watched parameter and what was seen of it."""

    __slots__ = ("armed", "backwards", "by_value", "gradient", "parameter", "seen", "step", "streaks", "version")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.gradient: weakref.ref[torch.Tensor] | None = None
        self.version = 0
        self.armed = False
        self.by_value = False  # it was found to be zeroed behind its version counter
        self.backwards = 0
        self.seen = NONE
        self.step = 0
        self.streaks = {ZEROED: 0, KEPT: 0}


class GradientProbe:
    """Watches one parameter of each optimizer."""

    def __init__(self, record: RecordWriter, clock: StepClock) -> None:
        self.record = record
        self.clock = clock
        self.sentinels: dict[int, _Sentinel] = {}
        self.worst = {ZEROED: 0, KEPT: 0}

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer stepped: draw the conclusion on the last interval, and arm for the next."""
        sentinel = self.sentinels.get(id(optimizer))
        parameter = None if sentinel is None else sentinel.parameter()
        if sentinel is not None and self.clock.steps - sentinel.step > 1:
            sentinel.armed = False  # steps went by between two looks: nothing is known of them
        if sentinel is None or parameter is None:
            parameter = _smallest_with_gradient(optimizer)
            if parameter is None:
                return
            if len(self.sentinels) >= 8:
                self.sentinels.clear()  # optimizers come and go: start over
            sentinel = self.sentinels[id(optimizer)] = _Sentinel(parameter)
        else:
            seen = sentinel.seen if sentinel.armed and sentinel.backwards == 1 else NONE
            for what in (ZEROED, KEPT):
                sentinel.streaks[what] = sentinel.streaks[what] + 1 if seen == what else 0
                self.worst[what] = max(self.worst[what], sentinel.streaks[what])
        sentinel.backwards = 0
        sentinel.step = self.clock.steps
        gradient = parameter.grad
        sentinel.armed = gradient is not None and not gradient.is_inference()
        if gradient is not None and sentinel.armed:
            sentinel.gradient = weakref.ref(gradient)
            sentinel.version = gradient._version

    def backward_begin(self) -> None:
        """Autograd starts: what has become of the watched gradients?"""
        for sentinel in self.sentinels.values():
            if not sentinel.armed:
                continue
            sentinel.backwards += 1
            if sentinel.backwards == 1:
                parameter = sentinel.parameter()
                sentinel.seen = NONE if parameter is None else _fate(sentinel, parameter.grad)

    def suspicious(self) -> bool:
        """Whether gradients were kept or zeroed for some steps: then each of the next ones counts."""
        return any(
            streak and self.worst[what] < LIMITS[what]
            for sentinel in self.sentinels.values()
            if self.clock.steps - sentinel.step <= 1  # its optimizer is in use
            for what, streak in sentinel.streaks.items()
        )

    @guarded("gradients")
    def publish(self) -> None:
        """Say the longest streaks."""
        for rule, what in ((ZEROED_RULE, ZEROED), (KEPT_RULE, KEPT)):
            if self.worst[what]:
                self.record.observe(rule, "", "", self.worst[what])


def _fate(sentinel: _Sentinel, gradient: torch.Tensor | None) -> str:
    before = None if sentinel.gradient is None else sentinel.gradient()
    if gradient is None or gradient is not before:
        return NONE
    if gradient._version != sentinel.version:
        return ZEROED
    doubtful = sentinel.by_value or sentinel.streaks[KEPT] >= READ_VALUES_AFTER
    if doubtful and gradient.device.type == "cpu" and not gradient.is_sparse:
        with torch.no_grad():
            if not bool(gradient.any()):
                sentinel.by_value = True
                return NONE
    return KEPT


def _smallest_with_gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    with_gradient = [
        parameter
        for group in optimizer.param_groups[:4]
        for parameter in group["params"][:8]
        if parameter.grad is not None
    ]
    return min(with_gradient, key=lambda parameter: parameter.numel(), default=None)
