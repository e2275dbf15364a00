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

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from time import monotonic_ns

from gpuwatch.catalog import (
    BATCHES,
    BETWEEN_SECONDS,
    EPOCH_RESTART_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_START_SECONDS,
    EPOCH_STARTS,
    EVALUATION_FORWARDS,
    EVALUATION_SECONDS,
    PHASE_SECONDS,
    STEP_BOUNDS,
    STEP_SECONDS,
)
from gpuwatch.layout import Phase, Tag, Word
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.pace import BEGIN, END, PAUSE, SHIFT

TRAIN, EVAL, EITHER, NO_GRAD = 0, 1, 2, 3
"""What a forward is for: training, evaluation (eval mode without gradients), not known yet (eval mode with gradients),
or, without gradients in train mode, part of the step it is in (a teacher) and evaluation elsewhere."""

SAMPLE_EVERY = 4
"""Probes that cost more than a comparison look at one step in this many."""

BATCHES_WITHOUT_OPTIMIZER = 32
"""After this many batches with a backward and no optimizer step, a batch counts as a step."""

# Plain ints: an enum's members cost a lookup each in code that runs six times a step.
OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER, EPOCH_START, EVALUATION, PENDING, BETWEEN = (int(phase) for phase in Phase)
_PHASES = len(Phase)
_NAMES = {DATA: "data", FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer", OTHER: "other"}
_HEARTBEAT, _PHASE, _STEP, _STEP_TIME = (int(word) for word in (Word.HEARTBEAT, Word.PHASE, Word.STEP, Word.STEP_TIME))
_NAN = float("nan")


class StepClock:
    """Moves through the phases of training steps and writes each finished step to the record."""

    def __init__(self, record: RecordWriter, after_step: Callable[[int], object]) -> None:
        self.record = record
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
        self.proportions = [0.0] * _PHASES
        self.backward_depth = 0
        self.backwards = 0
        self.unstepped_batches = 0
        self.optimizer_seen = False
        self.fetched = False
        self.opened = False
        self.evaluations = 0
        self.epochs = 0
        self.gc_nanoseconds = 0
        self.elements = _NAN
        self.last_mode = TRAIN
        self.totals = [0.0] * _PHASES
        self._series: dict[int, int] = {}
        self._index = {metric.name: record.counter(metric.name) for metric in _COUNTERS}
        self._bucket_index = [
            record.counter(f"{STEP_SECONDS.name}_bucket", le=f"{bound:g}") for bound in STEP_BOUNDS
        ] + [record.counter(f"{STEP_SECONDS.name}_bucket", le="+Inf")]
        self._sum_index = record.counter(f"{STEP_SECONDS.name}_sum")

    # -- events ------------------------------------------------------------------------------------------------------

    def open_begin(self) -> None:
        """The training thread asks a watched loader for an iterator."""
        self.fetch_begin(True)

    def open_end(self) -> int:
        """The iterator is there; returns how long that took, in nanoseconds."""
        self.opened = True
        return self.fetch_end(False, _NAN)

    def fetch_begin(self, first: bool) -> None:
        """The training thread asks a watched loader for a batch; ``first`` of an epoch or not."""
        now = self._move(EPOCH_START if first else DATA)
        if self.opened:
            self.opened = False  # the step's boundary was the opening
        elif self.stepped:
            self._close(self.spent, now)
            self._clear()
        elif not self.active:
            self._set_aside(BETWEEN)
        elif not self.trained and not self.blind:
            # A pass of the watched loader over the data without training: an evaluation, or batches skipped.
            self._set_aside(EVALUATION if self.evaluated else BETWEEN)
        elif not self.optimizer_seen and self.backwards:
            self.unstepped_batches += 1
            if self.unstepped_batches > BATCHES_WITHOUT_OPTIMIZER:
                self._count(now)
                self._close(self.spent, now)
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

    def epoch_started(self, wait: int, restart: bool) -> None:
        """The first batch of an epoch took ``wait`` nanoseconds; ``restart`` after the loader's first epoch."""
        self._add(EPOCH_STARTS.name, 1)
        if restart:
            self._add(EPOCH_RESTARTS.name, 1)
            self._add(EPOCH_RESTART_SECONDS.name, wait / 1e9)

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
            self._close(kept, now)
            self.spent = [later - earlier for later, earlier in zip(self.spent, kept, strict=True)]
            self.stepped.clear()
        if not self.stepped:
            self._count(now)
        self.stepped.add(optimizer)
        self.kept = self.spent[:]

    def stepped_mask(self) -> int:
        """The optimizers that stepped in the open step, a bit each."""
        return sum(1 << number for number in self.stepped)

    def finish(self) -> None:
        """The run ends: the open step is written if it is complete."""
        now = self._move(OTHER)
        if self.stepped:
            self._close(self.spent, now)
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
                    self._close(self.spent, now)
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

    def _close(self, spent: list[int], now: int) -> None:
        other, data, forward, backward, optimizer, epoch_start, evaluation, pending, between = spent
        total = other + data + forward + backward + optimizer
        evaluation += pending
        if self.unseen:  # one optimizer's part of the step was seen and another's was not: no part is the whole
            other += forward + backward + optimizer
            forward = backward = optimizer = 0
        looked = backward or forward
        tags = 0
        if epoch_start:
            tags = Tag.EPOCH_START.value
        if evaluation:
            tags |= Tag.EVALUATION.value
        if self.gc_nanoseconds:
            tags |= Tag.GC.value
        record = self.record
        record.step_row(
            now / 1e9,
            self.steps,
            total / 1e9,
            data / 1e9 if self.fetched else _NAN,
            forward / 1e9 if forward else _NAN,
            backward / 1e9 if backward else _NAN,
            optimizer / 1e9 if looked and optimizer else _NAN,
            epoch_start / 1e9,
            self.gc_nanoseconds / 1e9,
            self.elements,
            tags,
        )
        values = record.values
        seconds = total / 1e9
        bucket = self._bucket_index[bisect_left(STEP_BOUNDS, seconds)]
        values[bucket] += 1
        values[self._sum_index] += seconds
        self._charge(data, other, forward, backward, optimizer, looked=bool(looked))
        if epoch_start:
            self._add(EPOCH_START_SECONDS.name, epoch_start / 1e9)
        if evaluation:
            self._add(EVALUATION_SECONDS.name, evaluation / 1e9)
        if between:
            self._add(BETWEEN_SECONDS.name, between / 1e9)
        self.gc_nanoseconds = 0
        self.backwards = 0
        self.elements = _NAN  # a size that was not noted is not known
        self.fetched = self.active = self.trained = self.evaluated = self.blind = self.unseen = False
        self.after_step(now)

    def _charge(self, data: int, other: int, forward: int, backward: int, optimizer: int, looked: bool) -> None:
        """Add a step to the phases' totals; what was not told apart goes by the proportions of recent looks."""
        totals, proportions = self.totals, self.proportions
        if looked:
            for phase, nanoseconds in (
                (OTHER, other),
                (FORWARD, forward),
                (BACKWARD, backward),
                (OPTIMIZER, optimizer),
            ):
                totals[phase] += nanoseconds
                proportions[phase] = 0.75 * proportions[phase] + nanoseconds
        else:
            rest, whole = other + optimizer, sum(proportions)
            if whole:
                for phase in (OTHER, FORWARD, BACKWARD, OPTIMIZER):
                    totals[phase] += rest * proportions[phase] / whole
            else:
                totals[OTHER] += rest
        totals[DATA] += data

    def _set_aside(self, phase: int) -> None:
        """No step came of this time: charge all of it to evaluation, or to what lies between steps."""
        spent = self.spent
        evaluation = spent[EVALUATION] + spent[PENDING]
        rest = sum(spent) - evaluation
        if phase == EVALUATION:
            evaluation, rest = evaluation + rest, 0
        if evaluation:
            self._add(EVALUATION_SECONDS.name, evaluation / 1e9)
        if rest:
            self._add(BETWEEN_SECONDS.name, rest / 1e9)
        self._clear()
        self.fetched = self.active = self.trained = self.evaluated = self.blind = self.unseen = False

    def _add(self, name: str, amount: float) -> None:
        self.record.values[self._index[name]] += amount

    def publish(self) -> None:
        """Write the counters that need not be written at every step."""
        record = self.record
        for phase, nanoseconds in enumerate(self.totals):
            if not nanoseconds:
                continue  # a phase that was never seen is not known
            index = self._series.get(phase)
            if index is None:
                index = self._series[phase] = record.counter(PHASE_SECONDS.name, phase=_NAMES[phase])
            record.values[index] = nanoseconds / 1e9
        record.values[self._index[BATCHES.name]] = self.batches
        record.values[self._index[EVALUATION_FORWARDS.name]] = self.evaluations


_COUNTERS = (
    BATCHES,
    EVALUATION_SECONDS,
    EVALUATION_FORWARDS,
    BETWEEN_SECONDS,
    EPOCH_STARTS,
    EPOCH_START_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_RESTART_SECONDS,
)
