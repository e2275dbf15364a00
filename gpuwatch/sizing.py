"""How many loader workers a run needs, and how far ahead they should load: the smallest setting close to the best.

Everything is for one batch and in seconds; how long a step takes is :mod:`gpuwatch.delivery`'s to tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gpuwatch import means
from gpuwatch.delivery import Costs, Setting, cpu_seconds, quickest, step_seconds

WORKERS_PER_CORE = 4
"""Workers tried: those that wait for storage share a core, but not without limit."""

PREFETCHES = (2, 4, 8)
"""Batches each worker loads ahead: torch's default, and what evens out items that differ much in cost."""

GOOD_ENOUGH = 1.02
"""A smaller setting is preferred to a faster one within this factor."""

MARGIN = 1.1
"""The cost to make a batch counts this many times in the choice: a worker too few costs more than one too many."""

WORTH_CHANGING = 1.03
"""A setting in use is kept unless another is faster by this factor."""


@dataclass(frozen=True)
class Room:
    """What there is: cores to run on, workers that fit in memory, batches under way that fit in shared memory."""

    cores: float
    workers: int
    batches: int


@dataclass(frozen=True)
class Advice:
    """The setting to use and the share of step time that training would still not be running then.

    ``making`` is the mean time to make a batch (seconds, waits for a core left out), ``affordable`` the one at which
    training would hardly wait, None where batches cost no more. ``needed_cores`` are the cores at which they no longer
    hold training up. ``expected_wait`` is how long training waits for a batch (seconds) as it is set now, None where
    that was not worked out.
    """

    setting: Setting
    wait_ratio: float
    making: float
    affordable: float | None
    needed_cores: float
    expected_wait: float | None = None


def recommend(costs: Costs, room: Room, present: Setting, crowded: bool = False) -> Advice:
    """The smallest setting about as fast as the best one that fits; the present one where that gains next to nothing.

    ``crowded`` says that the present workers wait for each other's cores: then fewer are better, even if no faster.
    """
    careful = replace(
        costs, making=tuple(MARGIN * seconds for seconds in costs.making), making_cpu=MARGIN * costs.making_cpu
    )
    best = smallest(careful, room, present)
    keep = step_seconds(careful, room.cores, present) < WORTH_CHANGING * step_seconds(careful, room.cores, best)
    if keep and not (crowded and present.workers > best.workers):
        best = present
    expected = step_seconds(costs, room.cores, best)
    advice = advice_for(costs, room, best, max(0.0, 1 - costs.training / expected) if expected > 0 else 0.0)
    return replace(advice, expected_wait=max(0.0, step_seconds(costs, room.cores, present) - costs.training))


def advice_for(costs: Costs, room: Room, setting: Setting, wait_ratio: float) -> Advice:
    """This setting, with what would have to change for training not to wait."""
    return Advice(
        setting=setting,
        wait_ratio=wait_ratio,
        making=means.mean(costs.making),
        affordable=affordable(costs, room, setting),
        needed_cores=needed_cores(costs),
    )


def smallest(costs: Costs, room: Room, present: Setting) -> Setting:
    """The fewest workers, with the shortest prefetch, that come close to the best of all that fit."""
    possible = list(settings(room, present))
    least = {setting: quickest(costs, room.cores, setting) for setting in possible}
    # Nothing is faster than this; most often something small comes close, and the large ones need no replay.
    found = _first_within(costs, room.cores, least, min(least.values()))
    if found is not None:
        return found
    # More workers and a longer prefetch are never slower by this model: the best is among the largest.
    most, longest = possible[-1], max(possible, key=lambda setting: (setting.prefetch, setting.workers))
    best = min(step_seconds(costs, room.cores, setting) for setting in (most, longest))
    return _first_within(costs, room.cores, least, best) or most


def _first_within(costs: Costs, cores: float, least: Mapping[Setting, float], best: float) -> Setting | None:
    enough = GOOD_ENOUGH * best
    for setting, seconds in least.items():
        if seconds <= enough and step_seconds(costs, cores, setting) <= enough:
            return setting
    return None


def settings(room: Room, present: Setting) -> Iterator[Setting]:
    """Every setting to try that fits, smallest first. None at all always fits."""
    yield Setting(0, present.prefetch)
    prefetches = sorted({*PREFETCHES, present.prefetch})
    for workers in worker_counts(most_workers(room, present)):
        for prefetch in prefetches:
            if workers * prefetch <= room.batches:
                yield Setting(workers, prefetch)


def most_workers(room: Room, present: Setting) -> int:
    """The largest number of workers to try; what is there already may stay."""
    return min(room.workers, max(math.ceil(WORKERS_PER_CORE * room.cores), present.workers))


def worker_counts(most: int) -> Iterator[int]:
    """1, 2, 3, …, and in growing strides beyond sixteen."""
    workers = 1
    while workers < most:
        yield workers
        workers += max(1, workers // 8)
    if most > 0:
        yield most


def needed_cores(costs: Costs) -> float:
    """Cores at which they no longer hold training up."""
    pace = costs.training + costs.receiving
    return cpu_seconds(costs) / pace if pace > 0 else math.inf


def affordable(costs: Costs, room: Room, present: Setting) -> float | None:
    """Mean seconds to make a batch at which training would hardly wait, with as many workers as fit; None if it does.

    The CPU part is taken to shrink along with the whole. 0 where training alone takes all the cores.
    """
    pace = GOOD_ENOUGH * (costs.training + costs.receiving)
    making = means.mean(costs.making)
    by_workers = most_workers(room, present) * pace - costs.sending
    left = room.cores * pace - costs.training_cpu - costs.sending - costs.receiving
    by_cores = making * left / costs.making_cpu if costs.making_cpu > 0 else math.inf
    most = max(0.0, min(by_workers, by_cores))
    return most if most < making else None
