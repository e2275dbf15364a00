"""Small training loops of many shapes, and what the advisor says of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gpuwatch
from gpuwatch.advisor import Finding

# Other processes are busy too, and such small work gains nothing from more threads.
torch.set_num_threads(1)

Batch = tuple[torch.Tensor, ...]
AfterStep = Callable[[int, torch.Tensor, torch.Tensor], object]
"""Called with the step's number, the model's output and the loss, once the optimizer has stepped."""


def loader_of(steps: int, batch: int = 4, features: int = 8, **options: Any) -> DataLoader[Batch]:
    """Tensors in memory, enough for this many steps."""
    torch.manual_seed(0)
    items = torch.randn(steps * batch, features), torch.randn(steps * batch, 2)
    return DataLoader(TensorDataset(*items), batch_size=batch, **options)


def perceptron(features: int = 8, dropout: float = 0.1) -> nn.Sequential:
    """Two layers, with dropout between them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))


def convolutional() -> nn.Sequential:
    """A convolution with batch norm, for inputs of 8 features seen as a signal."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)
    )


def epochs(loader: DataLoader[Batch], steps: int) -> Iterator[tuple[int, int, Batch]]:
    """(step, epoch, batch), over and over the loader until there are enough."""
    step = epoch = 0
    while True:
        for batch in loader:
            yield step, epoch, batch
            step += 1
            if step == steps:
                return
        epoch += 1


def nothing(step: int) -> AbstractContextManager[object]:
    """A context that does nothing."""
    return contextlib.nullcontext()


def train(
    steps: int,
    *,
    model: nn.Module | None = None,
    loader: DataLoader[Batch] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, 0.01),
    clear: Callable[[torch.optim.Optimizer, int], object] = lambda optimizer, step: optimizer.zero_grad(),
    before: Callable[[int], object] = lambda step: None,
    around_step: Callable[[int], AbstractContextManager[object]] = nothing,
    around_backward: Callable[[int], AbstractContextManager[object]] = nothing,
    after: AfterStep = lambda step, output, loss: None,
) -> list[Finding]:
    """Train with everything watched, and return what was found."""
    model = perceptron() if model is None else model
    loader = loader_of(steps) if loader is None else loader
    optimizer = make_optimizer(model.parameters())
    watch = gpuwatch.attach(model, loader)
    for step, _, (inputs, targets) in epochs(loader, steps):
        before(step)
        with around_step(step):
            clear(optimizer, step)
            output = model(inputs)
            loss = nn.functional.mse_loss(output, targets)
            with around_backward(step):
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        after(step, output, loss)
    watch.detach()
    return watch.findings()


def found(findings: list[Finding], rule: str) -> bool:
    """Whether this rule is among them."""
    return any(finding.rule == rule for finding in findings)


def quiet(findings: list[Finding]) -> bool:
    """Whether nothing was found but what a busy machine can do to the time of any step."""
    return all(finding.rule.startswith(("comp-step", "comp-gc", "data-")) for finding in findings)


def only(findings: list[Finding], rule: str) -> Finding:
    """The finding of this rule."""
    (finding,) = [finding for finding in findings if finding.rule == rule]
    return finding


def from_step(first: int, context: Callable[[], Any]) -> Callable[[int], AbstractContextManager[object]]:
    """``context`` from this step on."""
    return lambda step: context() if step >= first else contextlib.nullcontext()


class Slow(Dataset[Batch]):
    """Items that take a while to load."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self.seconds)
        return torch.full((8,), float(index % 7)), torch.zeros(2)
