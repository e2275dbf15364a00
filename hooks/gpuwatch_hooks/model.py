"""Forward hooks on the watched model: the clock's forward phase, and the probes that look at outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from gpuwatch_hooks.clock import EITHER, EVAL, NO_GRAD, TRAIN
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.session import Session

MOST_TENSORS = 4
"""Tensors of an output that are looked at."""


class Hook:
    """A hook that a copy of the model does not keep.

    :mod:`gpuwatch_hooks.hiding` leaves it out. Where a class of the user's makes its own state, a harmless callable of
    the standard library takes its place: the copy is not watched, and loading it needs no gpuwatch.
    """

    __slots__ = ("pace", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.pace = session.pace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class ForwardBegin(Hook):
    """Forward pre-hook."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        # Dynamo takes this for the constant it is while compiling: one graph, no break.
        if not is_compiling() and self.pace.looking:
            forward_begin(self.session, module, arguments)


class ForwardEnd(Hook):
    """Forward hook."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, arguments: tuple[object, ...], output: object) -> None:
        if not is_compiling() and self.pace.looking:
            if self.session.modules.current is not None:
                measured_forward_end(self.session, module)
            forward_end(self.session, output)


@guarded("forward")
def forward_begin(session: Session, module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
    """A watched model (or a part of a watched container) is called."""
    if not torch.is_grad_enabled():
        mode = NO_GRAD if module.training else EVAL
    elif module.training:
        mode = TRAIN
    else:
        mode = EITHER
    clock = session.clock
    clock.forward_begin(mode)
    if mode in (TRAIN, EITHER):
        session.distributed.forward_begin(module)
    if mode == EITHER:
        session.evaluation.forward_begin()
    elif mode == TRAIN and session.evaluation.open:
        session.evaluation.judge()
    if mode == TRAIN and clock.steps >= session.modules.next_step:
        measured_forward_begin(session, module)
    if clock.elements != clock.elements and arguments:  # no loader told the size of the batch
        clock.elements = elements_of(arguments)


@guarded("modules")
def measured_forward_begin(session: Session, module: torch.nn.Module) -> None:
    """A measurement of the memory by module is due."""
    session.modules.forward_begin(module)


@guarded("measuring")
def measured_forward_end(session: Session, module: torch.nn.Module) -> None:
    """The forward that is measured returned, or one within it."""
    session.modules.forward_end(module)


@guarded("forward")
def forward_end(session: Session, output: object) -> None:
    """It returned."""
    clock = session.clock
    clock.forward_end()
    if session.evaluation.entered:
        session.evaluation.forward_end(list(tensors_of(output)))
    if clock.sampled and torch.is_grad_enabled():
        session.retention.look(list(tensors_of(output)))


def look(session: Session) -> Callable[[], None]:
    """Hook every watched model for a look; the returned function takes the hooks out again.

    A container that is never called itself (ModuleDict, ModuleList) is hooked by its parts.
    """
    handles: list[RemovableHandle] = []
    for watched in session.living():
        for part in callable_parts(watched):
            # `fully_shard` gathers parameters, and waits for other ranks, in a hook of its own: part of the forward.
            first = hasattr(type(part), "_get_fsdp_state")
            handles.append(part.register_forward_pre_hook(ForwardBegin(session), prepend=first))
            handles.append(part.register_forward_hook(ForwardEnd(session)))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def callable_parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model itself, or, where its class has no forward, the parts of it that have one."""
    if "forward" in vars(model) or getattr(type(model), "forward", None) is not torch.nn.Module.forward:
        # Hooks on this one switch off its fused path, and with it the last bits of its output.
        # A scripted one takes none.
        return [] if isinstance(model, (torch.nn.TransformerEncoderLayer, torch.jit.ScriptModule)) else [model]
    return [part for child in model.children() for part in callable_parts(child)]


def tensors_of(output: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """The first few tensors in an output that carry a graph: a tensor, or tuples, lists, dicts, objects of them."""
    found = 0
    stack: list[tuple[Any, int]] = [(output, depth)]
    while stack and found < MOST_TENSORS:
        item, left = stack.pop()
        # issubclass(type(...)): isinstance asks the object, and objects may raise.
        kind = type(item)
        parts: list[Any] = []
        if issubclass(kind, torch.Tensor):
            if item.grad_fn is not None:
                found += 1
                yield item
        elif issubclass(kind, (tuple, list)):
            parts = list(item[:8])
        elif issubclass(kind, dict):
            parts = list(dict.values(item))[:8]
        elif hasattr(kind, "__dataclass_fields__"):
            parts = list(vars(item).values())[:8]
        if left:
            stack.extend((part, left - 1) for part in reversed(parts))


def elements_of(batch: Any, depth: int = 3) -> float:
    """Elements of the first tensor in a batch; NaN when there is none."""
    kind = type(batch)
    if issubclass(kind, torch.Tensor):
        return float(batch.numel())
    if depth and issubclass(kind, (tuple, list)) and batch:
        return elements_of(batch[0], depth - 1)
    if depth and issubclass(kind, dict) and batch:
        return elements_of(next(iter(dict.values(batch))), depth - 1)
    return float("nan")
