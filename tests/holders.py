"""What can hold tensors: twins of a step's work, one that leaks and one that does not."""

from __future__ import annotations

import functools
import logging
import queue
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.loops import AfterStep

FEATURES = 32

Twin = Callable[[bool], AfterStep]
"""Makes what a loop does after each step: the fault where it is called with True, its sound twin with False."""


def wide() -> torch.Tensor:
    """A tensor of 64 KiB."""
    return torch.zeros(128, 128)


class Sample:
    """A key that can be referred to weakly."""


def weak_keys_that_never_die(leaks: bool) -> AfterStep:
    features: weakref.WeakKeyDictionary[Sample, torch.Tensor] = weakref.WeakKeyDictionary()
    samples: list[Sample] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        sample = Sample()
        features[sample] = wide()
        if leaks:
            samples.append(sample)

    return after


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        self.leaks = leaks
        self.records: list[object] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.records.append(record if self.leaks else record.levelno)


def log_records(leaks: bool) -> AfterStep:
    log = logging.getLogger("a program's")
    log.handlers = [Records(leaks)]
    log.propagate = False
    return lambda step, output, loss: log.warning("logits %s", wide())


class Slotted:
    """Without a dictionary."""

    __slots__ = ("items", "last")

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None


def slots(leaks: bool) -> AfterStep:
    slotted = Slotted()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        slotted.last = wide()
        if leaks:
            slotted.items.append(slotted.last)

    return after


def work_queue(leaks: bool) -> AfterStep:
    results: queue.Queue[torch.Tensor] = queue.Queue()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        results.put(wide())
        if not leaks:
            results.get()

    return after


@dataclass
class Episode:
    """What a policy keeps of a step."""

    actions: list[torch.distributions.Distribution] = field(default_factory=list)


def distributions(leaks: bool) -> AfterStep:
    episode = Episode()

    def kept(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        episode.actions.append(torch.distributions.Normal(wide(), 1.0))

    def started_anew(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        kept(step, output, loss)
        if len(episode.actions) > 15:
            episode.actions = []

    return kept if leaks else started_anew


def copies_of_the_model(leaks: bool) -> AfterStep:
    snapshots: list[nn.Module] = []

    def every_fifth(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step % 5 == 0:
            snapshots.append(nn.Sequential(nn.Linear(256, 256)))

    def last_two(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        every_fifth(step, output, loss)
        del snapshots[:-2]

    return every_fifth if leaks else last_two


def partial(leaks: bool) -> AfterStep:
    def collect(into: list[torch.Tensor], step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        into.append(wide())

    def replace(into: list[torch.Tensor], step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        into.append(wide())
        into.pop(0)

    return functools.partial(collect if leaks else replace, [])


def namespace_object(leaks: bool) -> AfterStep:
    state = types.SimpleNamespace(outputs=[])

    def kept(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        state.outputs.append(wide())

    def replaced(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        state.outputs = [wide()]

    return kept if leaks else replaced
