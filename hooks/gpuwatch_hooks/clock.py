"""The step clock: where a training step's time goes.

Everything the hooks see (a fetch, a forward, a backward, an optimizer step) moves the clock from one phase to the
next; the time since the last move is charged to the phase it was in. What a step is:

* it is complete when an optimizer steps (the *step count*), and ends where the next one begins (its *duration*): at the
  next fetch of a watched loader, or, without one, at that optimizer's next step;
* fetches without an optimizer step in between (gradient accumulation) belong to one step; two optimizers that step
  after one fetch (a GAN) do too;
* where no optimizer steps at all (parameters updated by hand), a batch with a backward counts as a step.

Evaluation is kept apart: forwards in eval mode without gradients, with what lies between them, wherever they are. A
forward in eval mode *with* gradients may be either; a backward decides.

Most steps are only noted (:mod:`gpuwatch_hooks.pace`) and replayed here later: of them the wait for data and the
whole are known. The rest of their time is charged to forward, backward, optimizer and other in the proportions of the
steps that were looked at.

Times are nanoseconds of CLOCK_MONOTONIC, so that the daemon can tell their age.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic_ns

from gpuwatch.layout import Word
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.ledger import (
    BACKWARD,
    BETWEEN,
    DATA,
    EPOCH_START,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PENDING,
    Ledger,
)
from gpuwatch_hooks.pace import BEGIN, END, PAUSE, SHIFT

TRAIN, EVAL, EITHER, NO_GRAD = 0, 1, 2, 3
"""What a forward is for: training, evaluation (eval mode without gradients), not known yet (eval mode with gradients),
or, without gradients in train mode, part of the step it is in (a teacher) and evaluation elsewhere."""

SAMPLE_EVERY = 4
"""Probes that cost more than a comparison look at one step in this many."""

BATCHES_WITHOUT_OPTIMIZER = 32
"""After this many batches with a backward and no optimizer step, a batch counts as a step."""

_PHASES = 9
_HEARTBEAT, _PHASE, _STEP, _STEP_TIME = (int(word) for word in (Word.HEARTBEAT, Word.PHASE, Word.STEP, Word.STEP_TIME))
_NAN = float("nan")


class StepClock:
    """Moves through the phases of training steps and writes each finished step to the record."""

    def __init__(self, record: RecordWriter, after_step: Callable[[int], object]) -> None:
        self.record = record
        self.ledger = Ledger(record)
        self.after_step = after_step
        self.on_phase: Callable[[int], None] | None = None  # the device's clock, where there is one
        self.mark = monotonic_ns()
        self.phase = OTHER
        self.base = OTHER  # where a nested phase returns to: OPTIMIZER inside a closure
        self.spent = [0] * _PHASES
        self.kept: list[int] | None = None  # `spent` as it was when the last optimizer step ended
        self.stepped: set[int] = set()
        self.steps = 0
        self.sampled = True
        self.batches = 0
        self.active = False  # a batch, a forward or a backward belongs to the open step
        self.trained = False  # a training forward or a backward does
        self.evaluated = False  # a forward that may be evaluation does
        self.blind = False  # part of the open step was only noted
        self.unseen = False  # an optimizer step of it was: its backward is not known
        self.pending_gap = 0  # nanoseconds of PENDING outside the forwards themselves
        self.gap_since = 0
        self.within_forward = False  # the running backward was called by a model's forward
        self.backward_depth = 0
        self.backwards = 0
        self.unstepped_batches = 0
        self.optimizer_seen = False
        self.fetched = False
        self.opened = False
        self.evaluations = 0
        self.epochs = 0
        self.gc_nanoseconds = 0
        self.elements = _NAN  # of the batch in work; a size that was not seen is not known
        self.kept_elements = _NAN  # of the step whose optimizer has stepped
        self.last_mode = TRAIN

    # -- events ------------------------------------------------------------------------------------------------------

    def open_begin(self, joins: bool = False) -> None:
        """The training thread asks a watched loader for an iterator."""
        self.fetch_begin(True, joins)

    def open_end(self) -> int:
        """The iterator is there; returns how long that took, in nanoseconds."""
        self.opened = True
        return self.fetch_end(False, _NAN)

    def fetch_begin(self, first: bool, joins: bool = False) -> None:
        """The training thread asks a watched loader for a batch; ``first`` of an epoch or not.

        The batch ``joins`` that of another loader: a step takes one of each.
        """
        now = self._move(EPOCH_START if first else DATA)
        if self.opened:
            self.opened = False  # the step's boundary was the opening
        elif self.stepped:
            self._close(self.spent, now, self.kept_elements)
            self._clear()
        elif not self.active:
            self._set_aside(BETWEEN)
        elif not self.trained and not self.blind and not joins:
            # A pass of the watched loader over the data without training: an evaluation, or batches skipped.
            self._set_aside(EVALUATION if self.evaluated else BETWEEN)
        elif not self.optimizer_seen and self.backwards:
            self.unstepped_batches += 1
            if self.unstepped_batches > BATCHES_WITHOUT_OPTIMIZER:
                self._count(now)
                self._close(self.spent, now, self.elements)
                self._clear()
        if first:
            self.epochs += 1

    def fetch_end(self, delivered: bool, elements: float) -> int:
        """The loader answered, with a batch or with the end of the epoch; returns the wait in nanoseconds."""
        before = self.mark
        self._move(self.base)
        wait = self.mark - before
        self.fetched = True
        if delivered:
            self.batches += 1
            self.active = True
            if elements == elements:
                self.elements = elements
        return wait

    def forward_begin(self, mode: int) -> None:
        """A watched model is called."""
        if self.phase == BACKWARD:
            return  # recomputation of a checkpoint is part of backward
        outside = bool(self.stepped) or not self.active
        if mode == TRAIN:
            self._move(FORWARD)
            self._settle_pending()
            self.active = self.trained = True
        elif mode == NO_GRAD and not outside:
            self._move(FORWARD)
            self.evaluated = True
        else:
            self._aside(PENDING if mode == EITHER else EVALUATION)
            self.evaluated = True
            if mode != EITHER:
                self.evaluations += 1
        if mode in (TRAIN, EITHER):
            self.last_mode = mode

    def _aside(self, phase: int) -> None:
        """A forward that is, or may be, of an evaluation."""
        # What came before it since the last event (a validation loader's start) belongs to the evaluation; but where
        # no loader is watched, a forward in eval mode may be training, and the gap its data.
        if self.phase == OTHER and (phase == EVALUATION or self.epochs):
            self.phase = phase
            self.gap_since = self.mark
        self._move(phase)
        self._end_gap()

    def forward_end(self) -> None:
        """The watched model returned."""
        phase = self.phase
        if phase == BACKWARD:
            return
        self._move(phase if phase in (EVALUATION, PENDING) else self.base)
        if phase == PENDING:
            self.gap_since = self.mark

    def backward_begin(self) -> None:
        """Autograd starts."""
        self.backward_depth += 1
        if self.backward_depth > 1:
            return
        self.within_forward = self.phase == FORWARD
        self._move(BACKWARD)
        self._end_gap()
        pending = self.spent[PENDING]
        if pending:
            self.spent[FORWARD] += pending - self.pending_gap
            self.spent[self.base] += self.pending_gap
            self.spent[PENDING] = self.pending_gap = 0
        self.backwards += 1
        self.active = self.trained = True

    def backward_end(self) -> None:
        """Autograd returned, or raised."""
        if self.backward_depth:
            self.backward_depth -= 1
        if not self.backward_depth and self.phase == BACKWARD:
            self._move(FORWARD if self.within_forward else self.base)

    def optimizer_begin(self) -> None:
        """An optimizer of a watched model steps."""
        self._move(OPTIMIZER)
        self.base = OPTIMIZER

    def optimizer_end(self, optimizer: int) -> None:
        """It has stepped; ``optimizer`` is its number."""
        self.base = OTHER
        now = self._move(OTHER)
        self.backward_depth = 0
        self.trained = True
        self._stepped(optimizer, now)

    def _stepped(self, optimizer: int, now: int) -> None:
        self.optimizer_seen = self.active = True
        if optimizer in self.stepped and self.kept is not None:
            kept = self.kept
            self._close(kept, now, self.kept_elements)
            self.spent = [later - earlier for later, earlier in zip(self.spent, kept, strict=True)]
            self.stepped.clear()
        if not self.stepped:
            self._count(now)
        self.stepped.add(optimizer)
        self.kept = self.spent[:]
        if self.elements == self.elements:
            self.kept_elements, self.elements = self.elements, _NAN

    def stepped_mask(self) -> int:
        """The optimizers that stepped in the open step, a bit each."""
        return sum(1 << number for number in self.stepped)

    def finish(self) -> None:
        """The run ends: the open step is written if it is complete."""
        now = self._move(OTHER)
        if self.stepped:
            self._close(self.spent, now, self.kept_elements)
        else:
            self._set_aside(EVALUATION if self.evaluated or self.spent[EVALUATION] else BETWEEN)
        self._clear()
        self.publish()

    def replay(self, notes: deque[int]) -> None:
        """Work through what the resting hooks noted since the last look."""
        if not notes:
            return
        take = notes.popleft
        phase = OTHER
        while notes:
            note = take()
            kind, now = note & 3, note >> SHIFT
            if kind == PAUSE:
                self.gc_nanoseconds += take()
                continue
            elapsed = now - self.mark
            self.mark = now
            phase = DATA if kind == BEGIN else OTHER
            if kind == BEGIN:
                self.spent[OTHER] += elapsed
                if self.stepped:
                    self._close(self.spent, now, self.kept_elements)
                    self._clear()
            elif kind == END:
                self.spent[DATA] += elapsed
                self.batches += 1
                self.active = self.fetched = self.blind = True
                elements = take()
                if elements >= 0:
                    self.elements = elements
            else:
                self.spent[OTHER] += elapsed
                self._stepped((note >> 2) & 15, now)
                self.blind = self.unseen = True
        self.phase = phase
        self.base = OTHER

    # -- moving ------------------------------------------------------------------------------------------------------

    def _move(self, phase: int) -> int:
        now = monotonic_ns()
        self.spent[self.phase] += now - self.mark
        self.mark = now
        self.phase = phase
        words = self.record.words
        words[_HEARTBEAT] = now
        words[_PHASE] = phase
        if self.on_phase is not None:
            self.on_phase(phase)
        return now

    def disregard(self) -> None:
        """What passed since the last event was the hooks' own work: it is no part of the user's step."""
        self.mark = monotonic_ns()

    def here(self) -> None:
        """What went before belongs to the present phase, whatever comes now (an evaluation)."""
        self._move(self.phase)

    def _settle_pending(self) -> None:
        self.gap_since = 0
        pending = self.spent[PENDING]
        if pending:
            self.spent[EVALUATION] += pending
            self.spent[PENDING] = self.pending_gap = 0

    def _end_gap(self) -> None:
        if self.gap_since:
            self.pending_gap += self.mark - self.gap_since
            self.gap_since = 0

    def _clear(self) -> None:
        self.spent = [0] * _PHASES
        self.stepped.clear()
        self.pending_gap = self.gap_since = 0

    def _count(self, now: int) -> None:
        self.steps += 1
        self.sampled = self.steps % SAMPLE_EVERY == 0
        words = self.record.words
        if self.steps > words[_STEP]:  # a step that is replayed was counted there when it happened
            words[_STEP_TIME] = now
            words[_STEP] = self.steps

    # -- writing -----------------------------------------------------------------------------------------------------

    def _close(self, spent: list[int], now: int, elements: float) -> None:
        self.ledger.step(
            spent,
            now,
            self.steps,
            fetched=self.fetched,
            unseen=self.unseen,
            gc_nanoseconds=self.gc_nanoseconds,
            elements=elements,
        )
        self.gc_nanoseconds = 0
        self.backwards = 0
        self.kept_elements = _NAN
        self.fetched = self.active = self.trained = self.evaluated = self.blind = self.unseen = False
        self.after_step(now)

    def _set_aside(self, phase: int) -> None:
        """No step came of this time: charge all of it to evaluation, or to what lies between steps."""
        evaluation = self.spent[EVALUATION] + self.spent[PENDING]
        rest = sum(self.spent) - evaluation
        if phase == EVALUATION:
            evaluation, rest = evaluation + rest, 0
        self.ledger.aside(evaluation, rest)
        self._clear()
        self.fetched = self.active = self.trained = self.evaluated = self.blind = self.unseen = False

    @guarded("clock")
    def publish(self) -> None:
        """Write the counters that need not be written at every step."""
        self.ledger.publish(self.batches, self.evaluations)
