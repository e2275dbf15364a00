"""Training loops whose time is scripted: what each part takes, to the nanosecond."""

from __future__ import annotations

import threading
import time as machine
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch
from gpuwatch.reader import Snapshot
from gpuwatch_hooks import attach as attaching
from gpuwatch_hooks import clock, contention, loader, optimizers, parts, sampling
from gpuwatch_hooks.stolen import StolenTime
from tests.loops import Batch

WAIT, OPEN, FORWARD, LOSS, BACKWARD, STEP, LOG = 1_000, 70_000, 200_000, 3_000, 500_000, 40_000, 9_000
"""Nanoseconds of each part of the scripted loops."""


@dataclass
class Script:
    """A clock that goes on only when it is told to."""

    now: int = 1_000_000_000

    def __call__(self) -> int:
        return self.now

    def spend(self, nanoseconds: int) -> None:
        """Let time pass."""
        self.now += nanoseconds


def slept_time(patch: pytest.MonkeyPatch) -> None:
    """From here on time goes on by what this process sleeps, and by nothing else: others leave it all cores.

    It sleeps no longer, either. Not for loaders with workers: they are other processes.
    """
    script = Script(machine.monotonic_ns())
    for module in (clock, loader, optimizers, parts, sampling):
        patch.setattr(module, "monotonic_ns", script)
    patch.setattr(machine, "sleep", lambda seconds: script.spend(round(seconds * 1e9)))
    patch.setattr(contention, "_run_delay", lambda: (threading.get_ident(), 0))
    patch.setattr(StolenTime, "note", lambda time, cpu: 0)


class Back(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor, time: Script, nanoseconds: int) -> torch.Tensor:
        context.time, context.nanoseconds = time, nanoseconds
        return output.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context.time.spend(context.nanoseconds)
        return gradient, None, None


class Model(nn.Module):
    """Takes its time, forward and backward."""

    def __init__(self, time: Script, forward: int = FORWARD, backward: int = BACKWARD) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.time = time
        self.nanoseconds = forward, backward
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        self.calls += 1
        self.time.spend(self.nanoseconds[0])
        output: torch.Tensor = Back.apply(self.layer(inputs), self.time, self.nanoseconds[1])  # type: ignore[no-untyped-call]
        return output


class Optimizer(torch.optim.Optimizer):
    """Takes its time over a step."""

    def __init__(self, parameters: Any, time: Script, nanoseconds: int = STEP) -> None:
        super().__init__(parameters, {})
        self.time = time
        self.nanoseconds = nanoseconds

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change nothing."""
        self.time.spend(self.nanoseconds)


@dataclass
class Loop:
    """What the scripted loops are made of, and where their time went."""

    time: Script
    model: Model = field(init=False)
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = Model(self.time)
        self.optimizer = Optimizer(self.model.parameters(), self.time)
        self.watch: gpuwatch.Watch | None = None
        self.second: gpuwatch.Watch | None = None

    def loader(self, batches: int, wait: int = WAIT) -> DataLoader[Batch]:
        """Each batch costs a wait; the iterator itself costs more."""

        class Opening(DataLoader[Batch]):
            def __iter__(this) -> Any:
                self.time.spend(OPEN)
                return super().__iter__()

        def collate(items: list[Batch]) -> Batch:
            self.time.spend(wait)
            return torch.stack([item[0] for item in items]), torch.zeros(())

        return Opening(TensorDataset(torch.ones(2 * batches, 2)), batch_size=2, collate_fn=collate)

    def attach(self, *arguments: Any, rest: bool = True, **options: Any) -> None:
        """Watch the loop."""
        self.watch = gpuwatch.attach(self.model, *arguments, **options)
        assert attaching._active is not None
        attaching._active.session.resting_allowed = rest

    def train_on(self, inputs: torch.Tensor) -> None:
        """One step's work on a batch, but for the optimizer."""
        output = self.model(inputs)
        self.time.spend(LOSS)
        output.sum().backward()

    def step(self, inputs: torch.Tensor) -> None:
        """One step."""
        self.train_on(inputs)
        self.optimizer.step()
        self.time.spend(LOG)

    def evaluate(self, batches: int, own_loader: int = 25_000) -> None:
        """Validate without gradients, on a loader that nobody watches."""
        self.model.eval()
        with torch.no_grad():
            for _ in range(batches):
                self.time.spend(own_loader)
                self.model(torch.ones(2, 2))
        self.model.train()

    def end(self) -> Snapshot:
        """Where the time went."""
        assert self.watch is not None
        if self.second is not None:
            self.second.detach()
        self.watch.detach()
        assert self.watch._last is not None
        return self.watch._last


EVALUATION = 4 * (25_000 + FORWARD)
