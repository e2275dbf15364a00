"""``gpuwatch run``: attach by itself, where the program does not.

A training is noticed when a DataLoader makes an iterator while an optimizer is there, or at the latest when an
optimizer steps. What is watched then: the models whose parameters the optimizers hold; loaders are found by themselves
(:mod:`gpuwatch_hooks.follow`). A program that calls ``attach`` is left to it. Once a training was noticed, nothing of
this file is in place any more.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpuwatch import config
from gpuwatch_hooks import attach
from gpuwatch_hooks.guard import guarded

MOST_SEARCHES = 8
"""Searches of the heap, about a tenth of a second each, after which only a step of an optimizer is waited for."""

_SEED = "_base_seed"

Module = torch.nn.Module


class _Birth:
    """Stands for an attribute that a loader's iterator sets once, as it is made: no frame of ours in a traceback."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting

    def __set__(self, iterator: Any, value: object) -> None:
        loader = sys._getframe(1).f_locals.get("loader")  # noqa: F841 - who follows loaders from now on asks here
        iterating(self.waiting)
        if vars(_BaseDataLoaderIter).get(_SEED) is self:
            iterator.__dict__[_SEED] = value
        else:
            setattr(iterator, _SEED, value)


class Waiting:
    """What waits for a training. One per process."""

    def __init__(self) -> None:
        self.searches = 0
        self.birth = _Birth(self)
        setattr(_BaseDataLoaderIter, _SEED, self.birth)
        self.steps = register_optimizer_step_pre_hook(self._step)

    def _step(self, optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        stepping(self, optimizer)

    def stop(self) -> None:
        """Wait no longer."""
        if vars(_BaseDataLoaderIter).get(_SEED) is self.birth:
            delattr(_BaseDataLoaderIter, _SEED)
        self.steps.remove()


@guarded("unaided")
def begin() -> None:
    """Wait for a training of this process."""
    if not config.disabled():
        Waiting()


@guarded("unaided")
def iterating(waiting: Waiting) -> None:
    """The program is about to iterate over a loader: has it got what it needs to train?"""
    if get_worker_info() is not None or waiting.searches >= MOST_SEARCHES or not optimizers_built():
        return
    waiting.searches += 1
    notice(waiting)


@guarded("unaided")
def stepping(waiting: Waiting, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer is about to step.

    Attaching adds to torch's global hooks, which are being gone through now; those of the optimizer itself come after
    them.
    """
    if torch.compiler.is_compiling():
        return
    handles: list[Any] = []

    def step(optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        handles.pop().remove()
        first_step(waiting)

    handles.append(optimizer.register_step_pre_hook(step))


@guarded("unaided")
def first_step(waiting: Waiting) -> None:
    """It steps, and nothing is in the way of attaching. Where no model is found, none ever is."""
    notice(waiting)
    waiting.stop()


def notice(waiting: Waiting) -> None:
    """Attach to the models that are trained, unless the program has attached by itself."""
    active = attach._active
    if active is not None and not active.session.ended:
        waiting.stop()
        return
    models = models_of(parameters(instances(torch.optim.Optimizer)))
    if models:
        waiting.stop()  # its place is taken by what follows loaders
    for model in models:
        _watches.append(attach.attach(model))


_watches: list[attach.Watch] = []
"""Of the models that were found; the end of the process detaches them."""


def optimizers_built() -> bool:
    """Whether an optimizer was ever built in this process: torch marks the class of one at its first instance."""
    classes = [torch.optim.Optimizer]
    while classes:
        kind = classes.pop()
        if getattr(vars(kind).get("step"), "hooked", False):
            return True
        classes += kind.__subclasses__()
    return False


def models_of(trained: set[int]) -> list[Module]:
    """The outermost modules that hold these parameters (by identity) and that can be called."""
    modules = instances(Module)
    parents: dict[int, list[Module]] = {}
    for module in modules:
        for child in _part(module, "_modules"):
            parents.setdefault(id(child), []).append(module)
    owners = [module for module in modules if any(id(each) in trained for each in _part(module, "_parameters"))]
    above: dict[int, Module] = {}
    while owners:
        module = owners.pop()
        if id(module) not in above:
            above[id(module)] = module
            owners += parents.get(id(module), ())
    outermost = [module for key, module in above.items() if not parents.get(key)]
    return [called for module in outermost for called in _callable(module, above)]


def _callable(module: Module, above: dict[int, Module]) -> Iterator[Module]:
    if type(module).forward is not Module.forward or "forward" in vars(module):  # the latter: what torch.compile gives
        yield module
        return
    for child in _part(module, "_modules"):  # of a list or a dictionary of models
        if id(child) in above:
            yield from _callable(above[id(child)], above)


def _part(module: Module, name: str) -> list[object]:
    part = vars(module).get(name)
    return [each for each in part.values() if each is not None] if isinstance(part, dict) else []


def parameters(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Identities of the parameters that these optimizers hold."""
    found: set[int] = set()
    for optimizer in optimizers:
        with contextlib.suppress(AttributeError):  # one that is being built in another thread
            found |= {id(each) for group in optimizer.param_groups for each in group["params"]}
    return found


def instances(kind: type) -> list[Any]:
    """Every living object of this type."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
