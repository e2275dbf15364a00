"""The caching allocator's settings, as the environment asks for them: do they contradict each other, or themselves?

torch takes ``PYTORCH_CUDA_ALLOC_CONF`` before ``PYTORCH_ALLOC_CONF``, also when it is empty (2.13). What is not
understood here is left alone: torch itself refuses a text that is malformed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

CONFLICT_RULE = "env-alloc-conf-conflict"
UNSAFE_RULE = "env-alloc-conf-unsafe"

OLD_NAME, NEW_NAME = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"

_NATIVE_ONLY = (
    "expandable_segments",
    "max_split_size_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "max_non_split_rounding_mb",
)
"""What the native allocator alone knows; ``cudaMallocAsync`` ignores it."""


def options(text: str) -> dict[str, str]:
    """The settings in a text such as ``expandable_segments:True,max_split_size_mb:128``; lists keep their brackets."""
    parts = re.findall(r"([^,:\[\]]+):((?:\[[^\]]*\])|[^,\[\]]*)", "".join(text.split()))
    return {key: value for key, value in parts if value}


def in_force(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that torch goes by."""
    return options(environment.get(OLD_NAME, environment.get(NEW_NAME, "")))


def conflicts(environment: Mapping[str, str], expandable: bool | None = None) -> Iterator[str]:
    """What is contradictory, in words; ``expandable`` is whether the allocator says that its segments can grow."""
    old, new = environment.get(OLD_NAME), environment.get(NEW_NAME)
    if old is not None and new is not None and options(old) != options(new):
        yield f"{OLD_NAME}={old!r} is in force, {NEW_NAME}={new!r} is not"
    if expandable is False and _true(in_force(environment).get("expandable_segments")):
        yield "expandable_segments:True was asked for, and the allocator does without"


def unsafe(settings: Mapping[str, str], fraction: float | None) -> Iterator[tuple[str, str]]:
    """Settings that do not work together, as (which, why); ``fraction`` is the process's share of the device."""
    expandable = _true(settings.get("expandable_segments"))
    if expandable and "max_split_size_mb" in settings:
        yield "max_split_size_mb", "with expandable_segments:True reserved memory grows without bound"
    limited = "per_process_memory_fraction" in settings or (fraction is not None and fraction < 1)
    if "garbage_collection_threshold" in settings and not limited and fraction is not None:
        yield "garbage_collection_threshold", "it does nothing unless the process has a memory fraction"
    if settings.get("backend") == "cudaMallocAsync":
        ignored = [key for key in _NATIVE_ONLY if key in settings]
        if ignored:
            yield ", ".join(ignored), "backend:cudaMallocAsync ignores it"


def _true(value: str | None) -> bool:
    return value is not None and value.lower() in ("true", "1")
