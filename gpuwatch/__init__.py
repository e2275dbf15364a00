"""gpuwatch: say why a PyTorch training run is slow or out of memory, and what to do about it.

``gpuwatch.attach(model, loader)`` is the one line a training script needs. Importing this package loads neither torch
nor anything else that is heavy; the hooks load at the first use of ``attach``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwatch.version import __version__

if TYPE_CHECKING:
    from gpuwatch_hooks.attach import Watch as Watch
    from gpuwatch_hooks.attach import attach as attach

__all__ = ["Watch", "__version__", "attach"]


def __getattr__(name: str) -> object:
    # The hooks import torch; nothing else here does, so they load on first use.
    if name in ("Watch", "attach"):
        import gpuwatch_hooks.attach

        return getattr(gpuwatch_hooks.attach, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
