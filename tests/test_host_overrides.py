"""Tensors of the user's own class, and modes that see every call of torch, see none of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import gpuwatch

Attach = Callable[..., Any]

LOG: list[str] = []


class Logged(torch.Tensor):
    """Its class is asked at every call."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        LOG.append(str(function))
        return super().__torch_function__(function, types, arguments, options or {})  # type: ignore[no-untyped-call]


class Logging(TorchFunctionMode):
    """Is asked at every call of any tensor."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        LOG.append(str(function))
        return function(*arguments, **(options or {}))


def together(rows: list[torch.Tensor]) -> torch.Tensor:
    """Batches of that class."""
    return torch.stack(rows).as_subclass(Logged)


def calls(attach: Attach) -> list[str]:
    """What a training calls, in looks and between them."""
    LOG.clear()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    rows: Any = [torch.ones(4)] * 160
    loader: DataLoader[torch.Tensor] = DataLoader(rows, 2, collate_fn=together)
    watch = attach(model, loader)
    with Logging():
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    if watch is not None:
        watch.detach()
    return list(LOG)


def test_what_is_asked_of_a_tensor_goes_past_its_class_and_every_mode(records: Path) -> None:
    without = calls(lambda *arguments: None)
    assert calls(gpuwatch.attach) == without and len(without) > 1000
