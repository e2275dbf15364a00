"""What reads the hooks of a module finds none of ours: they are no part of the model.

During a look a watched model carries hooks in its own dictionaries, and torch reads these in more places than the call:
a copy or a pickle would carry them along, TorchScript would try to compile them, CUDA graphs refuse modules that have
any, and a graph that torch.compile made of a model with hooks is made again when they go. So, during a look only, a
module's state leaves them out, and before the others read, the look is closed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
import torch.cuda.graphs
import torch.jit._recursive

from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.model import Hook
from gpuwatch_hooks.session import Session

READERS = (
    (torch, "compile"),  # loads what tells of compilations
    (torch.jit._recursive, "create_script_module"),  # scripting and tracing
    (torch.cuda, "make_graphed_callables"),
    (torch.cuda.graphs, "make_graphed_callables"),
)
"""Functions of torch that read hooks and would change their ways for ours."""


def install(session: Session) -> Callable[[], None]:
    """Hide the hooks of every look; the returned function stops it."""

    def compilation(_: object) -> None:
        withdraw(session)

    def listeners() -> list[Callable[[object], None]]:
        # Loaded by a compilation, not by us. `torch._dynamo.reset()` forgets them: the next look says it again.
        dynamo = sys.modules.get("torch._dynamo.callback")
        handler = getattr(dynamo, "callback_handler", None)
        return getattr(handler, "start_callbacks", [])

    def hide() -> Callable[[], None]:
        if compilation not in listeners():
            listeners().append(compilation)
        return look(session)

    def stop() -> None:
        if compilation in listeners():
            listeners().remove(compilation)

    session.looks.append(hide)
    return stop


def look(session: Session) -> Callable[[], None]:
    """Hide the hooks as long as a look is open; the returned function puts everything back."""
    places = [(torch.nn.Module, "__getstate__", _clean_state), *((*reader, _closing(session)) for reader in READERS)]
    replaced = []
    for owner, name, wrap in places:
        original = vars(owner).get(name)
        if original is not None:  # a torch that has no such function needs no hiding from it
            wrapper = functools.wraps(original)(wrap(original))
            setattr(owner, name, wrapper)
            replaced.append((owner, name, wrapper, original))

    def restore() -> None:
        for owner, name, wrapper, original in replaced:
            if vars(owner).get(name) is wrapper:  # someone else's wrapper on top stays
                setattr(owner, name, original)

    return restore


def _clean_state(original: Callable[..., object]) -> Callable[..., object]:
    def __getstate__(self: torch.nn.Module) -> object:
        state = original(self)
        leave_out(state)
        return state

    return __getstate__


def _closing(session: Session) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def wrap(original: Callable[..., object]) -> Callable[..., object]:
        def read(*arguments: object, **options: object) -> object:
            withdraw(session)
            return original(*arguments, **options)

        return read

    return wrap


@guarded("hiding")
def leave_out(state: object) -> None:
    """Take our hooks out of a module's state, which is a copy of its dictionary."""
    if not isinstance(state, dict):
        return
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = state.get(name)
        if isinstance(hooks, dict) and any(isinstance(hook, Hook) for hook in hooks.values()):
            state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not isinstance(hook, Hook))


@guarded("hiding")
def withdraw(session: Session) -> None:
    """Take the hooks out; the next step is looked at again."""
    session.withdraw_look()
