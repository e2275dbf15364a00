"""Short runs of small models whose memory is measured by module, and what they say of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch.catalog import MODEL_MEMORY
from gpuwatch.expr import series_key
from gpuwatch.report.document import document
from gpuwatch_hooks import modules, saved

F = 4
"""Bytes of a float."""

BATCH, LENGTH, WIDTH = 2, 6, 8
TOKENS = BATCH * LENGTH * WIDTH * F

Loss = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measurement is at step two."""
    monkeypatch.setattr(modules, "SCHEDULE", (2,))
    monkeypatch.setattr(saved, "compiled", lambda: False)  # another test may have compiled something


class Seen:
    """What a short run says of its memory."""

    def __init__(self, watch: gpuwatch.Watch) -> None:
        watch.detach()
        assert watch._last is not None
        self.values = watch._last.values
        self.findings: list[Finding] = watch.findings()
        self.rows = {row["module"]: row for row in document([watch._last])["memory"]["modules"] or []}

    def part(self, part: str) -> float | None:
        """Bytes of a part of the model."""
        return self.values.get(series_key(MODEL_MEMORY.name, {"part": part}))

    def saved(self) -> dict[str, int]:
        """Bytes of activations by module, those without left out."""
        return {name: row["activations_bytes"] for name, row in self.rows.items() if row["activations_bytes"]}


def run(
    model: nn.Module,
    inputs: torch.Tensor,
    steps: int = 5,
    loss: Loss = lambda output: output.sum(),
    kind: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = lambda some: torch.optim.SGD(some, 0.01),
    around: Callable[[], Any] = contextlib.nullcontext,
) -> Seen:
    """A few steps on the same batch, watched."""
    optimizer = kind(model.parameters())
    watch = gpuwatch.attach(model)
    for _ in range(steps):
        optimizer.zero_grad()
        with around():
            loss(model(inputs)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return Seen(watch)


class Named(nn.Module):
    """A convolution net whose parts have names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(4 * 4 * 4, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Classes."""
        answer: torch.Tensor = self.head(self.pool(self.act(self.norm(self.conv(inputs)))).flatten(1))
        return answer


class Block(nn.Module):
    """A transformer's block, attention written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One block."""
        q, k, v = self.project(self.norm(inputs)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        hidden = inputs + self.out(weights @ v)
        answer: torch.Tensor = hidden + self.down(self.act(self.up(hidden)))
        return answer


class Stack(nn.Module):
    """Several blocks; checkpointed or not."""

    def __init__(self, layers: int, width: int, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.checkpointed = checkpointed
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=self.reentrant) if self.checkpointed else layer(inputs)
        return inputs
