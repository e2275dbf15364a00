"""Module paths with repeated parts folded together: ``layers.3.mlp`` is ``layers.*.mlp``."""

from __future__ import annotations

MOST_CHARACTERS = 60


def folded(path: str) -> str:
    """The path without what wrappers put before it, numbers as ``*``; the end is kept when it is too long."""
    parts = ["*" if part.isdecimal() else part for part in path.split(".") if part not in _WRAPPERS]
    text = ".".join(parts)
    return text if len(text) <= MOST_CHARACTERS else "…" + text[-MOST_CHARACTERS + 1 :]


_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Wrappers that put a part of their own into every path; ``module`` (DDP) may be the user's own name, and stays."""
