"""The allocator's sizes: how a request is rounded, and how much is asked of the device for it."""

from __future__ import annotations

from gpuwatch.allocator.settings import Settings

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SMALLEST_BLOCK = 512
"""Every block is a multiple of this."""

LARGEST_SMALL = MIB
"""The largest request that the pool of small blocks serves; in the large pool no block is as small."""

SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT_BELOW = 10 * MIB
"""Larger requests get a segment of their own size."""

LARGE_SEGMENT_STEP = 2 * MIB

_FIRST_INTERVAL, _LAST_INTERVAL = 20, 35
"""``roundup_power2_divisions`` has one number for each power of two from 1 MiB (and below) to 32 GiB (and above)."""


def rounded(settings: Settings, requested: int) -> int:
    """The size of the block for a request, bytes."""
    if requested < SMALLEST_BLOCK:
        return SMALLEST_BLOCK
    power = requested.bit_length() - 1
    divisions = settings.roundup_power2_divisions[min(max(power, _FIRST_INTERVAL), _LAST_INTERVAL) - _FIRST_INTERVAL]
    if divisions > 1 and requested > SMALLEST_BLOCK * divisions:
        step = (1 << power) >> (divisions.bit_length() - 1)
        if not step:
            return requested if requested == 1 << power else 2 << power
        return -(-requested // step) * step
    return -(-requested // SMALLEST_BLOCK) * SMALLEST_BLOCK


def segment_size(settings: Settings, size: int) -> int:
    """What is asked of the device when no cached block serves a block of ``size`` bytes."""
    if size <= LARGEST_SMALL:
        return SMALL_SEGMENT
    if size < LARGE_SEGMENT_BELOW:
        return settings.large_segment_size
    return -(-size // LARGE_SEGMENT_STEP) * LARGE_SEGMENT_STEP


class Rounding(dict[int, int]):
    """Request to block size, remembered: a training run asks for few different sizes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def __missing__(self, requested: int) -> int:
        size = self[requested] = rounded(self._settings, requested)
        return size
