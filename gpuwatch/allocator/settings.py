"""The allocator's settings: read from a ``PYTORCH_CUDA_ALLOC_CONF`` text or from what a snapshot says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

UNLIMITED = (1 << 64) - 1
_MIB = 1 << 20
_INTERVALS = 16
"""Powers of two that ``roundup_power2_divisions`` tells apart: 1 MiB and below up to 32 GiB and above."""

_NOT_MODELLED = frozenset(
    {
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_free_catch_all",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
        "roundup_bypass_threshold_mb",
    }
)
"""Settings that torch knows and that do not change where a block goes in the device's memory."""


class SettingsError(ValueError):
    """A text of settings that torch would not take; the text says which part and why."""


@dataclass(frozen=True)
class Settings:
    """What decides where the allocator puts a block. Sizes in bytes."""

    expandable_segments: bool = False
    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * _MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = 20 * _MIB
    memory_fraction: float | None = None
    backend: str = "native"


def parse(text: str, base: Settings | None = None) -> Settings:
    """Settings from ``key:value,key:value``, those not named as in ``base``. Raises SettingsError."""
    settings = base or Settings()
    rounding_named = False
    for key, value in _pairs(text):
        if key == "expandable_segments":
            settings = replace(settings, expandable_segments=_truth(key, value))
        elif key == "max_split_size_mb":
            settings = replace(settings, max_split_size=_megabytes(key, value, 20, inclusive=True))
        elif key == "max_non_split_rounding_mb":
            settings = replace(settings, max_non_split_rounding=_megabytes(key, value, 20))
            rounding_named = True
        elif key == "large_segment_size_mb":
            settings = replace(settings, large_segment_size=_megabytes(key, value, 10))
            if not rounding_named:
                settings = replace(settings, max_non_split_rounding=settings.large_segment_size)
        elif key == "garbage_collection_threshold":
            settings = replace(settings, garbage_collection_threshold=_share(key, value))
        elif key == "per_process_memory_fraction":
            settings = replace(settings, memory_fraction=_share(key, value, inclusive=True))
        elif key == "roundup_power2_divisions":
            settings = replace(settings, roundup_power2_divisions=_divisions(value))
        elif key == "backend":
            settings = replace(settings, backend=value)
        elif key not in _NOT_MODELLED:
            raise SettingsError(f"unknown allocator setting {key!r}; known: {', '.join(KNOWN)}")
    return settings


KNOWN = (
    "expandable_segments",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "per_process_memory_fraction",
    "backend",
)
"""The settings that are modelled."""


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in re.findall(r"[^,\[]*(?:\[[^\]]*\]?)?[^,\[]*", text):
        part = "".join(part.split())
        if not part:
            continue
        key, colon, value = part.partition(":")
        if not colon or not key or not value:
            raise SettingsError(f"{part[:60]!r} is not a setting; expected key:value, such as expandable_segments:True")
        yield key, value


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise SettingsError(f"{key} is {value[:40]!r}; expected True or False")
    return value == "True"


def _megabytes(key: str, value: str, least: int, *, inclusive: bool = False) -> int:
    number = int(value) if value.isascii() and value.isdecimal() and len(value) < 13 else 0
    if number < least or (number == least and not inclusive):
        relation = "at least" if inclusive else "more than"
        raise SettingsError(f"{key} is {value[:40]!r}; expected a whole number of MiB, {relation} {least}")
    return number * _MIB


def _share(key: str, value: str, *, inclusive: bool = False) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share < 1 and not (inclusive and share == 1):
        raise SettingsError(f"{key} is {value[:40]!r}; expected a number between 0 and 1")
    return share


def _divisions(value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_power_of_two(value),) * _INTERVALS
    if not value.endswith("]"):
        raise SettingsError(f"roundup_power2_divisions is {value[:40]!r}; expected a closing ]")
    divisions = [0] * _INTERVALS
    after = 0
    for number, item in enumerate(value[1:-1].split(",")):
        limit, _, count_text = item.partition(":")
        count = _power_of_two(count_text)
        if limit == ">":
            divisions[after:] = [count] * (_INTERVALS - after)
            continue
        index = min(max(_power_of_two(limit).bit_length() - 1, 0), _INTERVALS - 1)
        if number == 0:
            divisions[:index] = [count] * index
        divisions[index] = count
        after = index + 1
    return tuple(divisions)


def _power_of_two(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 13 else -1
    if number < 0 or number & (number - 1):
        raise SettingsError(f"roundup_power2_divisions has {text[:40]!r}; expected a power of two")
    return number


def conf_of(settings: Settings) -> str:
    """The text that gives these settings; empty for torch's defaults."""
    default = Settings()
    parts = []
    if settings.backend != default.backend:
        parts.append(f"backend:{settings.backend}")
    if settings.expandable_segments:
        parts.append("expandable_segments:True")
    if settings.max_split_size != UNLIMITED:
        parts.append(f"max_split_size_mb:{settings.max_split_size // _MIB}")
    if settings.max_non_split_rounding not in (default.max_non_split_rounding, settings.large_segment_size):
        parts.append(f"max_non_split_rounding_mb:{settings.max_non_split_rounding // _MIB}")
    if settings.large_segment_size != default.large_segment_size:
        parts.append(f"large_segment_size_mb:{settings.large_segment_size // _MIB}")
    if settings.garbage_collection_threshold:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    if settings.memory_fraction is not None:
        parts.append(f"per_process_memory_fraction:{settings.memory_fraction:g}")
    if any(number > 1 for number in settings.roundup_power2_divisions):
        parts.append(f"roundup_power2_divisions:{_written_divisions(settings.roundup_power2_divisions)}")
    return ",".join(parts)


def _written_divisions(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    return "[" + ",".join(f"{1 << index}:{number}" for index, number in enumerate(divisions)) + "]"


def recorded(stated: Mapping[str, object]) -> Settings:
    """Settings from a snapshot's ``allocator_settings``. What cannot be read there stays at torch's default."""
    settings = Settings()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        text = stated.get(name)
        if isinstance(text, str) and text:
            try:
                settings = parse(text, settings)
            except SettingsError:
                continue  # the single values below are what was in force
    split = stated.get("max_split_size")
    if type(split) is int:
        settings = replace(settings, max_split_size=split if 0 < split < 1 << 62 else UNLIMITED)
    expandable = stated.get("expandable_segments")
    if isinstance(expandable, bool):
        settings = replace(settings, expandable_segments=expandable)
    threshold = stated.get("garbage_collection_threshold")
    if isinstance(threshold, float) and 0 <= threshold < 1:
        settings = replace(settings, garbage_collection_threshold=threshold)
    divisions = stated.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        numbers = [divisions.get(str(1 << index)) for index in range(_INTERVALS)]
        known = tuple(number for number in numbers if type(number) is int and 0 <= number <= 1 << 20)
        if len(known) == _INTERVALS:
            settings = replace(settings, roundup_power2_divisions=known)
    return settings
