"""When buffers are in step: DistributedDataParallel broadcasts them before a forward, and waits for rank 0 there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.compiler import is_compiling

from gpuwatch_hooks.model import Hook
from gpuwatch_hooks.session import Session


class InnerBegin(Hook):
    """Forward pre-hook of the module within DistributedDataParallel."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        if not is_compiling() and self.pace.looking:
            self.session.distributed.inner_begin()


def look(session: Session) -> Callable[[], None]:
    """Watch it during a look; the returned function takes the hook out again."""
    module = session.distributed.inner()
    if module is None:
        return lambda: None
    remove: Callable[[], None] = module.register_forward_pre_hook(InnerBegin(session)).remove
    return remove
