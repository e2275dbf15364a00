"""A model that is wrapped anew: after a process group was made again, say, in another DistributedDataParallel.

What was watched was the wrapper that is gone. What it wrapped trains on, and is watched from then on.
"""

from __future__ import annotations

import weakref
from typing import cast

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

Reference = weakref.ref[torch.nn.Module]


class Wrapped:
    """What the watched wrappers wrap, and which of it took the place of its wrapper among the ``models``."""

    def __init__(self, models: list[Reference]) -> None:
        self._models = models
        self._inner: list[tuple[Reference, Reference]] = []
        self._taken = False

    def note(self, model: torch.nn.Module) -> None:
        """A model is watched. Where it wraps one that had taken a wrapper's place, that one is watched no more."""
        if not issubclass(type(model), (DataParallel, DistributedDataParallel)):
            return
        inner = cast(torch.nn.Module, model.module)
        taken = [reference for _, reference in self._inner if reference() is inner]
        self._models[:] = [known for known in self._models if known not in taken]
        self._inner.append((weakref.ref(model), weakref.ref(inner)))

    def take_over(self) -> None:
        """What is left of wrappers that are gone takes their place."""
        for outer, inner in self._inner:
            if outer() is None and inner() is not None and any(known is outer for known in self._models):
                self._models[:] = [inner if known is outer else known for known in self._models]
                self._taken = True

    def changed(self) -> bool:
        """Whether that happened since this was last asked: a look that is open must take it in."""
        taken, self._taken = self._taken, False
        return taken
