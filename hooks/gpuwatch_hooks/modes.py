"""Switches between train and eval mode: when a watched model is put into eval mode, a look is opened.

``train`` of the model's own class is wrapped (``eval`` calls it). It runs once or twice an evaluation, so this costs
nothing at a step; a hook on the forward would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.model import callable_parts
from gpuwatch_hooks.session import Session


def install(session: Session, model: torch.nn.Module) -> list[Callable[[], None]]:
    """Wrap ``train`` of the classes of the model and of its callable parts; returns what undoes it."""
    kinds = {type(part) for part in (model, *callable_parts(model))}
    session.mode_ids.update(id(part) for part in (model, *callable_parts(model)))
    return [_wrap(session, kind) for kind in kinds if not hasattr(kind.train, "_gpuwatch")]


def _wrap(session: Session, kind: type[torch.nn.Module]) -> Callable[[], None]:
    own = vars(kind).get("train")
    inherited = kind.train

    @functools.wraps(inherited)
    def train(self: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
        result = inherited(self, mode)
        if not mode and id(self) in session.mode_ids:
            eval_mode(session)
        return result

    train._gpuwatch = True  # type: ignore[attr-defined]
    kind.train = train  # type: ignore[method-assign, assignment]

    def restore() -> None:
        if vars(kind).get("train") is not train:
            return  # replaced by someone else meanwhile
        if own is None:
            del kind.train
        else:
            kind.train = own  # type: ignore[method-assign]

    return restore


@guarded("modes")
def eval_mode(session: Session) -> None:
    """A watched model was put into eval mode: an evaluation is likely."""
    session.open_look()
