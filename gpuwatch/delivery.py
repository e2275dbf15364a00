"""How long a step takes with so many loader workers: a model of torch's loader, for one batch and in seconds.

Without workers a step is training and making a batch, one after the other. With workers it is the slowest of three:
training, the workers (a replay of torch's delivery: batches come in order, worker after worker, and only so many are
under way), and the cores, which all of them share.

Making a batch is taken to cost each worker the same, however many there are: true while storage keeps up.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuwatch import means

ROUNDS = 6
"""Of working out how much workers slow each other down; it hardly changes after that."""

FEW = 32
"""Workers up to which it matters that they are not all ready to run at the same time."""

REPLAYED_BATCHES = 241
"""Batches whose delivery is replayed. A prime: no number of workers deals the same costs to the same worker."""


@dataclass(frozen=True)
class Setting:
    """What a DataLoader is given: ``num_workers`` and ``prefetch_factor``."""

    workers: int
    prefetch: int


@dataclass(frozen=True)
class Costs:
    """What a batch costs this run, in seconds, waits for a core left out.

    ``training`` is a step without its wait for data and ``training_cpu`` the CPU time the training process uses for it.
    ``making`` are sorted times to make a batch (equally likely), ``making_cpu`` the mean CPU part of them. A worker
    spends ``sending`` more on each batch, and the training thread ``receiving``.
    """

    training: float
    training_cpu: float
    making: tuple[float, ...]
    making_cpu: float
    sending: float
    receiving: float


def step_seconds(costs: Costs, cores: float, setting: Setting) -> float:
    """How long a step takes with this setting."""
    least = quickest(costs, cores, setting)
    if setting.workers == 0:
        return least
    return max(least, delivery_seconds(crowded_costs(costs, cores, setting, least), setting))


def quickest(costs: Costs, cores: float, setting: Setting) -> float:
    """No step can be faster: the sum of what is done one after the other, what each worker does, what cores allow."""
    making = means.mean(costs.making)
    if setting.workers == 0:
        return max(costs.training + making, (costs.training_cpu + costs.making_cpu) / cores)
    return max(
        costs.training + costs.receiving,
        (making + costs.sending) / setting.workers,
        cpu_seconds(costs) / cores,
    )


def crowded_costs(costs: Costs, cores: float, setting: Setting, pace: float) -> Costs:
    """The costs where workers and training get in each other's way on so many cores.

    By mean values: each of the others is ready to run for a share of a step; what runs beside them is slowed down as
    they share the cores. The shares depend on how much everything is slowed down, so that it takes a few rounds.
    """
    making, training = means.mean(costs.making), costs.training_cpu + costs.receiving
    worker_cpu = costs.making_cpu + costs.sending
    working = trained = 1.0  # times as long as alone: a worker on a core, training on a core
    for _ in range(ROUNDS):
        pace = max(
            pace,
            costs.training + costs.receiving + (trained - 1) * training,
            (making + costs.sending + (working - 1) * worker_cpu) / setting.workers,
        )
        worker = min(1.0, working * worker_cpu / (setting.workers * pace)) if pace else 0.0
        trainer = min(1.0, trained * training / pace) if pace else 0.0
        working = slowdown(setting.workers - 1, worker, trainer, cores)
        trained = slowdown(setting.workers, worker, 0.0, cores)
    slower = 1 + (working - 1) * costs.making_cpu / making if making else 1.0
    return replace(
        costs,
        training=costs.training + (trained - 1) * costs.training_cpu,
        making=tuple(slower * seconds for seconds in costs.making),
        sending=working * costs.sending,
        receiving=trained * costs.receiving,
    )


def slowdown(others: int, each: float, one_more: float, cores: float) -> float:
    """How many times longer something runs beside others that are ready to run for these shares of the time."""
    if others > FEW:
        return max(1.0, (1 + others * each + one_more) / cores)
    expected = 0.0
    for ready in range(others + 1):
        likely = math.comb(others, ready) * each**ready * (1 - each) ** (others - ready)
        for more, share in ((0, 1 - one_more), (1, one_more)):
            expected += likely * share * max(1.0, (1 + ready + more) / cores)
    return expected


def cpu_seconds(costs: Costs) -> float:
    """CPU time of a step that is fed by workers, on all cores together."""
    return costs.training_cpu + costs.making_cpu + costs.sending + costs.receiving


def delivery_seconds(costs: Costs, setting: Setting) -> float:
    """Mean step when only the delivery of batches matters: torch's loader, replayed.

    As in ``torch.utils.data.dataloader._MultiProcessingDataLoaderIter``: ``workers * prefetch`` tasks are handed out in
    turn; each batch that training takes hands out one more; batches are taken in order, so a slow one holds up those
    behind it until the others have nothing left to do.
    """
    makings = shuffled(costs.making)
    under_way = setting.workers * setting.prefetch
    lead = 2 * under_way
    free = [0.0] * setting.workers
    taken = [0.0] * (lead + REPLAYED_BATCHES)
    now = 0.0
    begun = 0.0
    for task in range(lead + REPLAYED_BATCHES):
        if task == lead:
            begun = now
        handed_out = taken[task - under_way] if task >= under_way else 0.0
        worker = task % setting.workers
        free[worker] = max(handed_out, free[worker]) + makings[task % REPLAYED_BATCHES] + costs.sending
        now = max(now, free[worker]) + costs.receiving
        taken[task] = now
        now += costs.training
    return (now - begun) / REPLAYED_BATCHES


@functools.lru_cache(maxsize=16)
def shuffled(making: Sequence[float]) -> tuple[float, ...]:
    """As many times as are replayed, spread evenly over the sorted ones, in an order by chance (always the same)."""
    count = len(making)
    drawn = [making[int((index + 0.5) * count / REPLAYED_BATCHES)] for index in range(REPLAYED_BATCHES)]
    random.Random(REPLAYED_BATCHES).shuffle(drawn)
    return tuple(drawn)
