"""Noticing that the program has imported torch, without importing it first.

A program may set environment variables before it imports torch, so nothing here may do so for it. The import system
says when a module is complete by setting an attribute of its spec; torch's spec is given a class that listens to that.
No frame of ours is on the stack while torch loads, so an import that fails shows the traceback it always had.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

TORCH = "torch"


class _Spec(ModuleSpec):
    """A spec that tells when its module is loaded; a plain one again afterwards."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "_initializing" and not value:
            object.__setattr__(self, "__class__", ModuleSpec)
            if self.name in sys.modules:
                arrived()


class _Finder:
    """First on the import path until torch has arrived; finds nothing that the others would not."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TORCH:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(name, path, target)
            if spec is not None:
                if type(spec) is ModuleSpec:
                    object.__setattr__(spec, "__class__", _Spec)
                return spec
        return None


def expect() -> None:
    """Watch the training of this program, should it import torch."""
    if TORCH not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def arrived() -> None:
    """Torch is there: from now on a training is noticed."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    from gpuwatch_hooks.guard import guarded  # not before: it loads `logging`, which the program may do without

    guarded("unaided")(_wait_for_training)()


def _wait_for_training() -> None:
    try:
        from gpuwatch_hooks import unaided
    except ImportError as error:  # a torch that lacks what the hooks need
        print(f"gpuwatch: not watched: {error}", file=sys.stderr)
        return
    unaided.begin()
