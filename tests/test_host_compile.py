"""A compiled model stays one graph: no break, and no recompilation as looks come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import gpuwatch

torch.set_num_threads(1)

Attach = Callable[[nn.Module], object]
STEPS = 150


class Model(nn.Module):
    """A model whose forward is the user's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One number an item."""
        output: torch.Tensor = self.layers(inputs * 2)
        return output


def layers() -> nn.Module:
    """A model of a class of torch's own, which is traced from its call on."""
    return Model().layers


def wrapped_before(model: nn.Module, attach: Attach, counter: CompileCounter) -> Any:
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    attach(compiled)  # type: ignore[arg-type]
    return compiled


def wrapped_after(model: nn.Module, attach: Attach, counter: CompileCounter) -> Any:
    attach(model)
    return torch.compile(model, fullgraph=True, backend=counter)


def in_place_before(model: nn.Module, attach: Attach, counter: CompileCounter) -> Any:
    model.compile(fullgraph=True, backend=counter)
    attach(model)
    return model


def in_place_after(model: nn.Module, attach: Attach, counter: CompileCounter) -> Any:
    attach(model)
    model.compile(fullgraph=True, backend=counter)
    return model


def inside_a_function(model: nn.Module, attach: Attach, counter: CompileCounter) -> Any:
    attach(model)
    return torch.compile(lambda inputs: model(inputs) + 1, fullgraph=True, backend=counter)


def modes_in_the_graph(model: nn.Module, attach: Attach, counter: CompileCounter) -> Any:
    def switching(inputs: torch.Tensor) -> Any:
        model.eval()
        frozen = model(inputs).detach()
        model.train()
        return model(inputs) - frozen

    attach(model)
    return torch.compile(switching, fullgraph=True, backend=counter)


WAYS = (wrapped_before, wrapped_after, in_place_before, in_place_after, inside_a_function, modes_in_the_graph)


def figures(way: Callable[..., Any], make: Callable[[], nn.Module], attach: Attach) -> tuple[object, ...]:
    """Graphs, frames, breaks and the losses of a training with a validation in its middle."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = make()
    counter = CompileCounter()
    call = way(model, attach, counter)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(STEPS):
        loss = call(torch.randn(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step in (30, 100):
            model.eval()
            with torch.no_grad():
                losses.append(call(torch.randn(2, 4)).sum().item())
            model.train()
    seen = {name: dict(counters[name]) for name in ("graph_break", "unimplemented", "recompiles")}
    frames = dict(counters["frames"])
    return counter.frame_count, counter.op_count, counters["stats"]["unique_graphs"], seen, frames, losses


CASES = [(way, make) for way in WAYS for make in (Model, layers) if way.__name__[:8] != "in_place" or make is Model]
"""``model.compile`` finds no frame to compile in a class of torch's own."""


@pytest.mark.parametrize(("way", "make"), CASES)
def test_it_is_compiled_as_without_gpuwatch(
    way: Callable[..., Any], make: Callable[[], nn.Module], records: Path
) -> None:
    expected = figures(way, make, lambda model: None)
    watches = []
    actual = figures(way, make, lambda model: watches.append(gpuwatch.attach(model)))
    for watch in watches:
        watch.detach()
    assert actual == expected
    assert not any(actual[3].values())  # type: ignore[attr-defined]


# What tracing an optimizer imports.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_optimizer_is_compiled_once(records: Path) -> None:
    def run(attach: Attach) -> tuple[object, ...]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        counter = CompileCounter()
        step = torch.compile(optimizer.step, backend=counter)
        attach(model)
        for _ in range(STEPS):
            model(torch.randn(2, 4)).square().mean().backward()
            step()
            optimizer.zero_grad()
        values = [parameter.tolist() for parameter in model.parameters()]
        return counter.frame_count, counter.op_count, dict(counters["graph_break"]), values

    expected = run(lambda model: None)
    with_gpuwatch = run(lambda model: gpuwatch.attach(model))
    assert with_gpuwatch == expected
