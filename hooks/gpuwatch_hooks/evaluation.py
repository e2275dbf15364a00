"""Two faults around evaluation: forwards that build graphs for nothing, and a model left in eval mode.

A forward in eval mode with gradients enabled is not a fault in itself: statistics may be frozen on purpose, saliency
needs gradients. What tells is whether autograd ever comes through its output, so such outputs carry a mark that a
backward touches.
"""

from __future__ import annotations

import weakref

import torch

from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import TRAIN, StepClock
from gpuwatch_hooks.place import user_place

WASTED_RULE = "eval-grad-enabled"
LEFT_RULE = "state-eval-mode"

SURE_AFTER = 16
"""Forwards with a backward in a row after which only each 16th is marked: a model that trains in eval mode."""


class _Mark:
    """Touched by a backward through the output it was put on."""

    __slots__ = ("counted", "probe", "used")

    def __init__(self, probe: EvaluationProbe) -> None:
        self.probe = probe
        self.used = False
        self.counted = False

    def __call__(self, gradients: object) -> None:
        self.used = True
        if self.counted:  # judged too early: the backward came later than a training step
            self.counted = False
            self.probe.wasted -= 1


class EvaluationProbe:
    """Judges the forwards in eval mode, and the training flag."""

    def __init__(self, record: RecordWriter, clock: StepClock, models: list[weakref.ref[torch.nn.Module]]) -> None:
        self.record = record
        self.clock = clock
        self.models = models
        self.entered = False  # inside a forward that may waste its graph
        self.open: list[_Mark] = []  # marks of this phase, not judged yet
        self.place = ""
        self.wasted = 0
        self.wasted_place = ""
        self._used_in_a_row = 0
        self._skipped = 0
        self._train_steps = 0
        self._evaluations_then = 0
        self._left_steps = 0
        self._left_place = ""
        self._matters: bool | None = None

    def forward_begin(self) -> None:
        """A forward in eval mode with gradients enabled."""
        if self._used_in_a_row >= SURE_AFTER:
            self._skipped += 1
            if self._skipped % SURE_AFTER:
                return
        self.entered = True
        if not self.open:
            self.place = user_place()

    def forward_end(self, outputs: list[torch.Tensor]) -> None:
        """Its outputs that carry a graph; none when nothing of the model is trainable."""
        self.entered = False
        if not outputs:
            return
        mark = _Mark(self)
        for output in outputs:
            node = output.grad_fn
            if node is not None:
                node.register_prehook(mark)
        self.open.append(mark)

    def judge(self) -> None:
        """Training goes on: what was not used by now was built for nothing."""
        unused = [mark for mark in self.open if not mark.used]
        self._used_in_a_row = 0 if unused else self._used_in_a_row + len(self.open)
        self.open.clear()
        self.clock.evaluations += len(unused)
        if len(unused) < 2:
            return  # a single forward (a look at one sample) is no evaluation
        for mark in unused:
            mark.counted = True
        self.wasted += len(unused)
        self.wasted_place = self.place
        self._publish_wasted()

    def optimizer_end(self) -> None:
        """An optimizer stepped: in which mode was the model?"""
        if self.clock.last_mode == TRAIN:
            self._train_steps += 1
            self._left_steps = 0
            self._evaluations_then = self.clock.evaluations
        elif self._train_steps and self._left_behind():
            self._left_steps += 1

    def _left_behind(self) -> bool:
        # A switch to eval mode without an evaluation is a choice: statistics are frozen for a second stage.
        if self.clock.evaluations == self._evaluations_then:
            return False
        if self._matters is None:
            self._matters = any(
                mode_matters(module) for model in self.models if (living := model()) for module in living.modules()
            )
        return self._matters

    def publish(self) -> None:
        """Say what was seen."""
        self._publish_wasted()
        if self._left_steps:
            self.record.observe(LEFT_RULE, "model.training", "the model was in train mode before", self._left_steps)

    def _publish_wasted(self) -> None:
        if self.wasted:
            self.record.observe(WASTED_RULE, self.wasted_place, "", self.wasted)


def mode_matters(module: torch.nn.Module) -> bool:
    """Whether train or eval mode may change what a module does: dropout, batch statistics, a class of the user's."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn"):
        return True
    if isinstance(module, (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)):
        return True
    return bool(getattr(module, "dropout", 0.0))
