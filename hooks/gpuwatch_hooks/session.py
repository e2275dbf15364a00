"""One watched run in this process: record, clock and probes. The first attach makes it, the last detach ends it.

A process has one session at a time: several attaches (a GAN) share it, as they share the loop.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch

from gpuwatch.catalog import GUARD_FAULTS
from gpuwatch.layout import State
from gpuwatch.reader import Snapshot
from gpuwatch.record import RecordWriter
from gpuwatch_hooks import guard
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.contention import CoreWait
from gpuwatch_hooks.copy_on_write import CopyProbe
from gpuwatch_hooks.cycles import CycleProbe
from gpuwatch_hooks.device import DeviceProbe
from gpuwatch_hooks.distributed import DistributedProbe
from gpuwatch_hooks.evaluation import EvaluationProbe
from gpuwatch_hooks.gradients import GradientProbe
from gpuwatch_hooks.growth import GrowthProbe
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.handles import HandleProbe
from gpuwatch_hooks.identity import local_ranks
from gpuwatch_hooks.leaks import LeakProbe, Surroundings
from gpuwatch_hooks.loading import LoadingProbe
from gpuwatch_hooks.memory import HostMemory
from gpuwatch_hooks.modules import ModuleProbe
from gpuwatch_hooks.ownership import OwnershipProbe
from gpuwatch_hooks.pace import DENSE_STEPS, Pace
from gpuwatch_hooks.pauses import PauseProbe
from gpuwatch_hooks.precision import PrecisionProbe
from gpuwatch_hooks.resources import ResourceProbe
from gpuwatch_hooks.retention import RetentionProbe
from gpuwatch_hooks.rewrapped import Wrapped
from gpuwatch_hooks.switches import SwitchProbe
from gpuwatch_hooks.threads import ThreadProbe
from gpuwatch_hooks.watchedloader import LoaderWatch
from gpuwatch_hooks.workertable import WorkerTable


class Publishes(Protocol):
    """A part of the session with something to write now and then; guarded, lest a fault in one loses the others'."""

    def publish(self) -> None:
        """Write it."""


TICK_NANOSECONDS = 1_000_000_000
"""How often the rare readings (memory, observations) are written."""


class Session:
    """Everything of one run. ``models`` are weak: watching keeps nothing of the user's alive."""

    def __init__(self, directory: Path, identity: dict[str, object]) -> None:
        self.record = RecordWriter(directory, identity)
        try:
            self._make_probes()
        except BaseException:
            self.record.discard()  # one that nobody writes would read like that of a process that died
            raise

    def _make_probes(self) -> None:
        self.clock = StepClock(self.record, self._after_step)
        self.pace = Pace(self.record)
        self.looks: list[Callable[[], Callable[[], None]]] = []
        self._closers: list[Callable[[], None]] = []
        self.resting_allowed = True
        self._look_from = 0  # steps complete when the look was opened
        self._all_optimizers = 0  # those that have stepped so far, a bit each
        self.models: list[weakref.ref[torch.nn.Module]] = []
        self.wrapped = Wrapped(self.models)
        self.parameter_ids: set[int] = set()
        self.mode_ids: set[int] = set()
        self.evaluation = EvaluationProbe(self.record, self.clock, self.models)
        self.retention = RetentionProbe(self.record, self.clock)
        self.cycles = CycleProbe(self.record, self.clock, self.retention)
        self.gradients = GradientProbe(self.record, self.clock)
        self.switches = SwitchProbe(self.record, self.clock)
        self.pauses = PauseProbe(self.record, self.clock, self.pace)
        self.precision = PrecisionProbe(self.record, self.models)
        self.memory = HostMemory(self.record)
        self.core_wait = CoreWait(self.record)
        self.resources = ResourceProbe(self.record)
        self.threads = ThreadProbe(self.record, local_ranks())
        self.device = DeviceProbe(self.record, self.clock)
        self.distributed = DistributedProbe(self.record, self.models, self.clock.ledger.looked)
        self.growth = GrowthProbe(self.record, self.clock)
        self.leaks = LeakProbe(self.record, self.clock, self.models, self.retention, self.growth)
        self.handles = HandleProbe(self.record, self.clock, self.models)
        self.ownership = OwnershipProbe(self.record, self.clock, self.models)
        self.modules = ModuleProbe(self.record, self.clock, self.models, self.ownership.living)
        self.loaders: list[LoaderWatch] = []
        self.worker_table = WorkerTable(self.record)
        self.copies = CopyProbe(self.record, self.clock)
        self.loading = LoadingProbe(self.record, self.clock, self.loaders)
        self.ended = False
        self.failed = False  # what ends it is written down
        self.pace.next_tick = time.monotonic_ns() + TICK_NANOSECONDS // 4
        for probe, count in guard.faults().items():
            self._fault(probe, count)  # while the probes were made
        guard.listeners.append(self._fault)
        _alive.append(self)

    def add_model(self, model: torch.nn.Module) -> None:
        """Watch this model's parameters too."""
        if all(known() is not model for known in self.models):
            self.wrapped.note(model)
            self.models.append(weakref.ref(model))
        self.know_parameters()

    def forget(self, reference: weakref.ref[torch.nn.Module]) -> None:
        """Watch this model no longer."""
        model = reference()
        self.models[:] = [known for known in self.models if known() is not None and known() is not model]
        self.know_parameters()
        self.renew_look()

    def know_parameters(self) -> None:
        """Take down the identities of all parameters again: models grow, and layers are replaced."""
        self.wrapped.take_over()
        self.parameter_ids = {id(parameter) for model in self.living() for parameter in model.parameters()}

    def living(self) -> Iterable[torch.nn.Module]:
        """The watched models that still exist."""
        return [model for known in self.models if (model := known()) is not None]

    def open_look(self) -> None:
        """All hooks in place, until the next optimizer step."""
        if self.pace.looking or self.ended:
            return
        self.clock.replay(self.pace.notes)
        self._put_in_place()

    def _put_in_place(self) -> None:
        self.pace.looking = True
        self._look_from = self.clock.steps
        self.clock.sampled = True
        for put_in_place in self.looks:  # one by one: when the next one fails, those before can be taken out
            self._closers.append(put_in_place())

    def close_look(self) -> None:
        """Only the resting hooks remain."""
        self.pace.looking = False
        while self._closers:
            self._closers.pop()()

    def withdraw_look(self) -> None:
        """Close an open look before its time; the next optimizer step opens another."""
        if self.pace.looking:
            self._rest()
            self.pace.next_look = 0

    def _rest(self) -> None:
        pace = self.pace
        pace.steps = self.clock.steps
        pace.mask = self.clock.stepped_mask()
        pace.rest_until(pace.steps, self.clock.mark, hurried=self.retention.suspicious() or self.growth.suspicious())
        self.close_look()

    def renew_look(self) -> None:
        """A model came or went: a look that is open takes that in."""
        if self.pace.looking:
            self.close_look()
            self._put_in_place()

    def after_optimizer(self, now: int) -> None:
        """An optimizer has stepped, and a look or a tick may be due."""
        pace = self.pace
        if not pace.looking:
            if now >= pace.next_tick:
                self.clock.replay(pace.notes)
                pace.next_tick = now + TICK_NANOSECONDS
                tick(self)
                self.clock.disregard()
            if pace.steps >= pace.next_look and (self._all_stepped(pace.mask) or pace.steps > pace.next_look + 1):
                self.open_look()
                self.clock.disregard()
            return
        self.loading.trained_here()
        search(self)
        step_ended(self)
        pace.steps = self.clock.steps
        mask = self.clock.stepped_mask()
        self._all_optimizers |= mask
        if pace.steps >= DENSE_STEPS and self.resting_allowed and self._seen_whole(mask) and not self._suspicious():
            self._rest()
        self.clock.disregard()

    def _all_stepped(self, mask: int) -> bool:
        return mask & self._all_optimizers == self._all_optimizers

    def _seen_whole(self, mask: int) -> bool:
        """Whether the look has lasted a step, with all its optimizers: a part of one would say the wrong shares."""
        steps = self.clock.steps - self._look_from
        return steps > 1 or (steps == 1 and self._all_stepped(mask))

    def _suspicious(self) -> bool:
        """Whether a probe saw what may be a fault: then steps are looked at in a row until it is sure, or was wrong."""
        probes = (self.switches, self.gradients, self.evaluation, self.threads)
        return any(probe.suspicious() for probe in probes)

    def _after_step(self, now: int) -> None:
        if self.device.active:
            self.device.after_step(now)
        if self.pace.looking and not self.clock.optimizer_seen:
            search(self)
            step_ended(self)
            if self.pace.several:
                self.pace.stepped(self.clock.steps)
            self.clock.disregard()
        if self.pace.looking and now >= self.pace.next_tick:
            self.pace.next_tick = now + TICK_NANOSECONDS
            tick(self)
            self.clock.disregard()

    def varying(self) -> bool:
        """Whether batches differ in size, or are not seen."""
        feeding = [loader for loader in self.loaders if loader.feeds is not False]
        return any(loader.differing for loader in feeding) or not feeding

    def publish(self) -> None:
        """Write everything that is not written at each step."""
        parts: tuple[Publishes, ...] = (
            self.clock,
            self.evaluation,
            self.retention,
            self.gradients,
            self.switches,
            self.pauses,
            self.precision,
            self.memory,
            self.core_wait,
            self.resources,
            self.threads,
            self.device,
            self.distributed,
            self.growth,
            self.handles,
            self.cycles,
            self.loading,
        )
        for part in parts:
            part.publish()
        self.copies.publish(self.loaders)
        if self.loading.main is not None:
            self.worker_table.publish(self.loading.main.workers)

    def _fault(self, probe: str, count: int) -> None:
        at = self.record.series(GUARD_FAULTS.name, probe=probe)
        # Making the series may set off a garbage collection, whose probes may fail too.
        self.record.values[at] = guard.faults().get(probe, count)

    def snapshot(self) -> Snapshot:
        """What a reader of the record would see now."""
        self.clock.replay(self.pace.notes)
        self.loading.conclude()
        self.publish()
        return self.record.snapshot()

    def finish(self, state: State) -> Snapshot | None:
        """End the run: last readings, the end mark, the lease given up. None when it had ended before."""
        if self.ended:
            return None
        self.close_look()
        self.ended = True
        _alive.remove(self)
        finish_clock(self)
        self.publish()
        self.modules.stop()
        self.pauses.stop()
        self.cycles.stop()
        self.device.stop()
        self.record.close(state)
        self.pace.words = self.record.words
        guard.listeners.remove(self._fault)
        return self.record.snapshot()


_alive: list[Session] = []
"""Those that have not ended. No weak set: what a signal raises in its callbacks is lost."""


@guarded("tick")
def tick(session: Session) -> None:
    """The rare readings, about once a second, between two steps."""
    session.publish()


@guarded("leaks")
def search(session: Session) -> None:
    """A step ended during a look: is a search due, is memory growing?"""
    session.growth.look(session.varying())
    session.leaks.look(sys._getframe(), surroundings(session))


@guarded("leaks")
def asked(session: Session) -> None:
    """A batch to train on is asked for during a look: is a search due that had to wait for it?"""
    session.leaks.asked(sys._getframe(), surroundings(session))


def surroundings(session: Session) -> Surroundings:
    """What a search for leaks goes by."""
    epochs = sum(loader.epochs for loader in session.loaders if loader.feeds is not False)
    return Surroundings(epochs, session.parameter_ids, session.varying())


@guarded("handles")
def step_ended(session: Session) -> None:
    """A step ended during a look: what is counted at the same point of each."""
    session.handles.step_end()
    session.ownership.step_end()
    session.threads.step_end()
    session.device.step_end(session.varying())
    session.distributed.step_end()
    if session.modules.current is not None or session.modules.done:
        measurement_ended(session)


@guarded("measuring")
def measurement_ended(session: Session) -> None:
    """A step ended in which a model's memory was measured."""
    session.modules.step_end()


@guarded("clock")
def finish_clock(session: Session) -> None:
    """Close the open step."""
    session.clock.replay(session.pace.notes)
    session.loading.conclude()
    if session.evaluation.open:
        session.evaluation.judge()
    session.clock.finish()


@guarded("fork")
def _after_fork() -> None:
    # A child's hooks run on, but store into private memory; it prints no summary and ends no run.
    for session in _alive:
        session.ended = True
        session.record.after_fork_in_child()
        session.pace.words = session.record.words
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)
