"""Torch's loader on a machine that does not exist: cores are shared evenly, to the last instant, and time is virtual.

What the model of :mod:`gpuwatch.delivery` works out from means and a replay, this plays through event by event.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from gpuwatch.delivery import Costs, Setting

COUNTED = 240
"""Steps of which the mean is taken."""

Part = list[float]
"""What is left of one thing to do: seconds asleep, then seconds of CPU time."""


@dataclass(frozen=True)
class Imagined:
    """A load: seconds of a step asleep and on a core; of batches, equally likely; to send and to receive one."""

    step: tuple[float, float]
    batches: tuple[tuple[float, float], ...]
    sending: float
    receiving: float

    def costs(self) -> Costs:
        """What would be measured of it."""
        cpu = sum(busy for _, busy in self.batches) / len(self.batches)
        making = tuple(sorted(map(sum, self.batches)))
        return Costs(sum(self.step), self.step[1], making, cpu, self.sending, self.receiving)


class Loop:
    """The loop and its workers: what each is at, and what waits for it."""

    def __init__(self, load: Imagined, setting: Setting, seed: int) -> None:
        self.load = load
        self.setting = setting
        draw = random.Random(seed)
        self.batches: Iterator[tuple[float, float]] = iter(lambda: draw.choice(load.batches), None)
        self.handed_out = 0
        self.waiting: list[deque[int]] = [deque() for _ in range(setting.workers)]
        self.making: list[int | None] = [None] * setting.workers
        self.doing: list[list[Part]] = [[] for _ in range(setting.workers + 1)]  # the last is the training thread
        self.ready: set[int] = set()
        self.taken = 0
        for _ in range(setting.workers * setting.prefetch):
            self.hand_out()

    def hand_out(self) -> None:
        """One more batch to make, for the next worker."""
        self.waiting[self.handed_out % self.setting.workers].append(self.handed_out)
        self.handed_out += 1

    def begin(self) -> None:
        """Whoever is idle begins what it has to do."""
        for worker, queue in enumerate(self.waiting):
            if not self.doing[worker]:
                if (made := self.making[worker]) is not None:
                    self.ready.add(made)
                    self.making[worker] = None
                if queue:
                    self.making[worker] = queue.popleft()
                    asleep, busy = next(self.batches)
                    self.doing[worker] = [[asleep, busy + self.load.sending]]
        if not self.doing[-1] and self.taken in self.ready:
            self.ready.remove(self.taken)
            self.taken += 1
            self.hand_out()
            self.doing[-1] = [[0.0, self.load.receiving], list(self.load.step)]

    def advance(self, cores: float) -> float:
        """Up to the next moment at which something ends; the seconds until then."""
        at = [parts[0] for parts in self.doing if parts]
        running = [part for part in at if part[0] <= 0]
        share = min(1.0, cores / len(running)) if running else 1.0
        passed = min(part[0] if part[0] > 0 else part[1] / share for part in at)
        for part in at:
            if part[0] > 0:
                part[0] -= passed
                if part[0] < 1e-12:
                    part[0] = 0.0
            else:
                part[1] -= passed * share
        for parts in self.doing:
            while parts and parts[0][0] <= 0 and parts[0][1] < 1e-12:
                parts.pop(0)
        return passed


def played_step(load: Imagined, cores: float, setting: Setting, seed: int = 0) -> float:
    """Mean seconds of a step once it runs evenly."""
    if setting.workers == 0:
        alone = [asleep + busy / min(1.0, cores) for asleep, busy in load.batches]
        return load.step[0] + load.step[1] / min(1.0, cores) + sum(alone) / len(alone)
    loop = Loop(load, setting, seed)
    lead = min(2 * setting.workers * setting.prefetch + 10, 80)
    now = begun = 0.0
    while True:
        loop.begin()
        if loop.taken >= lead and not begun:
            begun = now
        if loop.taken >= lead + COUNTED:
            return (now - begun) / COUNTED
        now += loop.advance(cores)
