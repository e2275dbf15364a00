"""Optimizers, found by themselves: torch's global step hooks see every one, also those built later.

An optimizer belongs to the run when it holds a parameter of a watched model. Where none does (flat parameters of a
wrapper), the first one that keeps stepping is taken.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from time import monotonic_ns
from types import CodeType, FrameType

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpuwatch.layout import Word
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.pace import KIND_BITS, MOST_OPTIMIZERS, SHIFT, STEP
from gpuwatch_hooks.session import Session

MOST_FRAMES = 32
"""How far up the stack a step within a step is looked for."""

_wrapping = getattr(getattr(torch.optim.Optimizer, "profile_hook_step", None), "__code__", None)
_codes = [code for code in getattr(_wrapping, "co_consts", ()) if isinstance(code, CodeType)]
WRAPPER = next((code for code in _codes if code.co_name == "wrapper"), None)
"""The code that torch puts around every step, and that calls its hooks; None where a torch has it by another name."""

STEPS_TO_ADOPT = 3
FOREIGN = -1
_STEP, _STEP_TIME = int(Word.STEP), int(Word.STEP_TIME)


class Optimizers:
    """Which optimizers belong to the run, by identity: a small number each, or :data:`FOREIGN`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.known: dict[int, int] = {}
        self.layered: set[int] = set()  # those whose hooks may be called more than once a step
        self._references: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._foreign_steps = 0

    def add(self, optimizer: torch.optim.Optimizer, ours: bool = True) -> None:
        """Remember it, without keeping it alive."""
        key = id(optimizer)
        known, references, layered = self.known, self._references, self.layered

        def forget(_: object) -> None:
            known.pop(key, None)
            references.pop(key, None)
            layered.discard(key)

        references[key] = weakref.ref(optimizer, forget)
        taken = set(known.values())
        free = next(number for number in range(len(taken) + 1) if number not in taken)
        known[key] = free if ours else FOREIGN
        # More of them than a note can name (an optimizer per parameter): every step is looked at.
        self.session.resting_allowed = self.session.resting_allowed and free < MOST_OPTIMIZERS

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Its number, decided once per optimizer."""
        self.session.know_parameters()
        ids = self.session.parameter_ids
        ours = any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])
        if not ours and all(number == FOREIGN for number in self.known.values()):
            self._foreign_steps += 1
            if self._foreign_steps < STEPS_TO_ADOPT:
                return FOREIGN  # asked again at its next step
            ours = True
        self.add(optimizer, ours)
        return self.known[id(optimizer)]


@guarded("optimizer")
def layered(optimizers: Optimizers, optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has wrapped the steps of several classes that this optimizer's is made of.

    It wraps the step of each class that was instantiated. Where a subclass calls its parent's step, hooks are called
    for both.
    """
    kinds = type(optimizer).__mro__
    if sum(getattr(vars(kind).get("step"), "hooked", False) is True for kind in kinds) < 2:
        return False
    optimizers.layered.add(id(optimizer))
    return True


@guarded("optimizer")
def within(optimizer: torch.optim.Optimizer, frame: FrameType | None) -> bool:
    """Whether a hook that was called from this frame is called within another step of the same optimizer.

    Takes some microseconds: asked of layered ones alone.
    """
    wrappers = 0
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        wrappers += frame.f_code is WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return wrappers > 1


@guarded("optimizer")
def step_begin(optimizers: Optimizers, optimizer: torch.optim.Optimizer) -> None:
    """During a look: some optimizer of this process is about to step."""
    number = optimizers.known.get(id(optimizer))
    if number is None:
        number = optimizers.number_of(optimizer)
    if number != FOREIGN:
        session = optimizers.session
        if session.evaluation.open:
            session.evaluation.judge()
        session.clock.optimizer_begin()


@guarded("optimizer")
def step_end(optimizers: Optimizers, optimizer: torch.optim.Optimizer) -> None:
    """Some optimizer has stepped: during a look, or one not seen before."""
    number = optimizers.known.get(id(optimizer))
    if number is None:
        number = optimizers.number_of(optimizer)
    session = optimizers.session
    if number == FOREIGN:
        owner_stepped(session, optimizer)
        return
    session.open_look()
    if session.wrapped.changed():
        session.renew_look()
    session.clock.optimizer_end(number)
    if session.pace.several:
        session.pace.stepped(session.clock.steps)
    session.gradients.optimizer_end(optimizer)
    session.evaluation.optimizer_end()
    owner_stepped(session, optimizer)
    session.after_optimizer(monotonic_ns())


@guarded("ownership")
def owner_stepped(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer of the run has stepped, during a look or for the first time."""
    session.ownership.stepped(optimizer)


@guarded("optimizer")
def due(session: Session, now: int, optimizer: torch.optim.Optimizer) -> None:
    """Between looks: a tick or the next look."""
    session.after_optimizer(now)
    if session.pace.looking:
        session.gradients.optimizer_end(optimizer)  # what becomes of its gradients is seen at the next backward


def install(session: Session) -> tuple[Optimizers, Callable[[], None]]:
    """Watch every optimizer; the returned function stops it."""
    optimizers = Optimizers(session)

    def begin(optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        if is_compiling() or (layered(optimizers, optimizer) and within(optimizer, sys._getframe(1))):
            return
        step_begin(optimizers, optimizer)

    pace = session.pace
    numbers, several_layers = optimizers.known, optimizers.layered
    note = pace.note

    def end(optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        if is_compiling():
            return
        if several_layers and id(optimizer) in several_layers and within(optimizer, sys._getframe(1)):
            return
        number = numbers.get(id(optimizer))
        if pace.looking or number is None:
            step_end(optimizers, optimizer)
        elif number != FOREIGN:
            # Between looks this is all: count the step in the record, note the moment, see whether something is due.
            now = monotonic_ns()
            note(now << SHIFT | number << KIND_BITS | STEP)
            bit = 1 << number
            if pace.mask and not pace.mask & bit:
                pace.mask |= bit  # another optimizer in the same step
                if pace.steps >= pace.next_look:
                    due(session, now, optimizer)
                return
            pace.mask = bit
            pace.steps = steps = pace.steps + 1
            words = pace.words
            words[_STEP_TIME] = now
            words[_STEP] = steps
            if pace.several:
                pace.stepped(steps)
            if steps >= pace.next_look or now >= pace.next_tick:
                due(session, now, optimizer)

    def look() -> Callable[[], None]:
        handle: Callable[[], None] = register_optimizer_step_pre_hook(begin).remove
        return handle

    session.looks.append(look)
    return optimizers, register_optimizer_step_post_hook(end).remove
