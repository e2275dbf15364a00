"""When autograd runs: one function of torch, through which every backward() and grad() goes, is wrapped.

Hooks on tensors would tell too, but cost 6 us a step (measured: registering one 2, calling it 4), and see only the
outputs they were put on. The wrapper is in place during a look only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch

from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.session import Session

# torch >= 2.3 routes both through this name, looked up at each call, so that `from torch.autograd import grad` is seen.
NAMES = ("_engine_run_backward",) if hasattr(torch.autograd, "_engine_run_backward") else ("backward", "grad")


def look(session: Session) -> Callable[[], None]:
    """Watch autograd during a look; the returned function puts everything back."""
    return wrap_autograd(lambda original: _watched(session, original))


def wrap_autograd(wrapped: Callable[[Callable[..., object]], Callable[..., object]]) -> Callable[[], None]:
    """Put a wrapper around autograd's entry; the returned function takes it out again."""
    originals = {name: getattr(torch.autograd, name) for name in NAMES}
    wrappers = {name: wrapped(original) for name, original in originals.items()}
    for name, wrapper in wrappers.items():
        setattr(torch.autograd, name, wrapper)

    def restore() -> None:
        for name, wrapper in wrappers.items():
            if getattr(torch.autograd, name) is wrapper:  # someone else's wrapper on top stays
                setattr(torch.autograd, name, originals[name])

    return restore


def _watched(session: Session, run_backward: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(run_backward)
    def watched_backward(*arguments: object, **options: object) -> object:
        backward_begin(session)
        returned = False
        try:
            result = run_backward(*arguments, **options)
            returned = True
            return result
        finally:
            backward_end(session)
            if not returned:
                leave_no_frame()

    return watched_backward


def leave_no_frame() -> None:
    """What is raised through a wrapper shows the program's frames and torch's, not the wrapper's (Python 3.11 on)."""
    error = sys.exc_info()[1]
    if error is not None and error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


@guarded("backward")
def backward_begin(session: Session) -> None:
    """Autograd starts, on the thread that asked for it."""
    clock = session.clock
    clock.backward_begin()
    if clock.backward_depth == 1:
        session.gradients.backward_begin()
        session.switches.look()
        session.evaluation.backward_begin()
        session.distributed.backward_begin()
        if session.modules.current is not None:
            measurement_backward(session)


@guarded("measuring")
def measurement_backward(session: Session) -> None:
    """The model's memory is being measured, and autograd starts."""
    session.modules.backward_begin()


@guarded("backward")
def backward_end(session: Session) -> None:
    """Autograd returned or raised."""
    session.clock.backward_end()
