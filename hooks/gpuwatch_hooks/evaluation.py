"""Two faults around evaluation: forwards that build graphs for nothing, and a model left in eval mode.

A forward in eval mode with gradients enabled is not a fault in itself: statistics may be frozen on purpose, saliency
needs gradients. What tells is whether autograd ever comes through its output, so such outputs carry a mark that a
backward touches.
"""

from __future__ import annotations

import weakref

import torch

from gpuwatch.limits import EVAL_MODE_STEPS
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import TRAIN, StepClock
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.place import user_place

WASTED_RULE = "eval-grad-enabled"
LEFT_RULE = "state-eval-mode"

FEWEST_WASTED = 4
"""Forwards without a backward below which it was a look at some samples and no evaluation."""


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
        self._train_steps = 0
        self._evaluations_then = 0
        self._left = False
        self._left_from = 0  # the first step of the present stretch in eval mode
        self._left_steps = 0  # the longest of them that began with an evaluation
        self._left_place = ""
        self._matters: bool | None = None

    def forward_begin(self) -> None:
        """A forward in eval mode with gradients enabled."""
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

    def backward_begin(self) -> None:
        """Autograd starts. Inside a forward the model itself needs it (forces from an energy): nothing is wasted."""
        self.entered = False

    def switched(self) -> None:
        """The model was put into eval mode by hand; an evaluation counts from here."""
        self._evaluations_then = self.clock.evaluations

    def judge(self) -> None:
        """Training goes on: what was not used by now was built for nothing."""
        unused = [mark for mark in self.open if not mark.used]
        self.open.clear()
        self.clock.evaluations += len(unused)
        if len(unused) < FEWEST_WASTED:
            return
        for mark in unused:
            mark.counted = True
        self.wasted += len(unused)
        self.wasted_place = self.place
        self._publish_wasted()

    def optimizer_end(self) -> None:
        """An optimizer stepped: in which mode was the model?"""
        steps = self.clock.steps
        if self.clock.last_mode == TRAIN:
            self._train_steps += 1
            self._left_from = 0
            self._evaluations_then = self.clock.evaluations
        elif self._train_steps:
            if not self._left_from:  # the first step in eval mode decides for all that follow
                self._left_from = steps
                self._left = self._left_behind()
            if self._left:
                self._left_steps = max(self._left_steps, steps - self._left_from + 1)

    def suspicious(self) -> bool:
        """Whether the mode may have been forgotten: then each of the next steps counts."""
        return self._left and bool(self._left_from) and self._left_steps < EVAL_MODE_STEPS

    def _left_behind(self) -> bool:
        # Eval mode without an evaluation since the switch is a choice: statistics are frozen for a second stage.
        if self.clock.evaluations == self._evaluations_then:
            return False
        if self._matters is None:
            self._matters = any(
                mode_matters(module) for model in self.models if (living := model()) for module in living.modules()
            )
        return self._matters

    @guarded("evaluation")
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
