"""Switches between train and eval mode: when a watched model is put into eval mode, a look is opened.

``torch.nn.Module.train`` is wrapped (``eval`` calls it, and so does a ``train`` of the user's class). It runs once or
twice an evaluation, so this costs nothing at a step; a hook on the forward would. The classes of the user stay as they
are: their own ``train`` may be anything, and some programs pickle classes by value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.compiler import is_compiling

from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.model import callable_parts
from gpuwatch_hooks.session import Session


def watch(session: Session, model: torch.nn.Module) -> None:
    """Take this model's switches, and those of its callable parts, for the session's."""
    session.mode_ids.update(id(part) for part in (model, *callable_parts(model)))


def install(session: Session) -> Callable[[], None]:
    """Listen to every switch; the returned function stops it."""
    original = torch.nn.Module.train

    @functools.wraps(original)
    def train(self: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
        before = vars(self).get("training", False)  # not by attribute: that may be the user's code
        result = original(self, mode)
        if not is_compiling() and id(self) in session.mode_ids:
            switched(session, self, before)
        return result

    torch.nn.Module.train = train  # type: ignore[method-assign, assignment]

    def restore() -> None:
        if torch.nn.Module.train is train:  # someone else's wrapper on top stays
            torch.nn.Module.train = original  # type: ignore[method-assign]

    return restore


@guarded("modes")
def switched(session: Session, model: torch.nn.Module, before: bool) -> None:
    """A watched model was put into one of the modes: eval mode announces an evaluation."""
    if not model.training:
        session.open_look()
        session.clock.here()
        if before:
            session.evaluation.switched()
