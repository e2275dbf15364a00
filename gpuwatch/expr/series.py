"""Series and their names: what a condition is computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Samples = Sequence[tuple[float, float]]
"""Readings of one series, oldest first, as (seconds, value)."""

History = Mapping[str, Samples]
"""What is known of one rank or one GPU: per series (see :func:`series_key`) its samples."""


def series_key(name: str, labels: Mapping[str, str] | None = None) -> str:
    """A series' name in a :data:`History`: ``name`` or ``name{a="1",b="2"}``, labels sorted and escaped."""
    if not labels:
        return name
    return name + "{" + ",".join(f'{label}="{escape(text)}"' for label, text in sorted(labels.items())) + "}"


def escape(text: str) -> str:
    """A label value as the Prometheus text format wants it."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
