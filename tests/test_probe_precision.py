"""Models in float64 that nobody asked for, and models somebody did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch
from tests.loops import Batch, found, only, perceptron, train

pytestmark = pytest.mark.usefixtures("records")

RULE = "comp-float64"


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def wide_loader(steps: int) -> DataLoader[Batch]:
    """Batches in float64."""
    items = torch.randn(4 * steps, 8, dtype=torch.float64), torch.randn(4 * steps, 2, dtype=torch.float64)
    return DataLoader(TensorDataset(*items), batch_size=4)


@pytest.mark.parametrize("steps", [10, 60])
def test_a_model_in_float64_is_found(steps: int) -> None:
    finding = only(train(steps, model=perceptron().double(), loader=wide_loader(steps)), RULE)
    assert finding.where == "Sequential.0.weight"
    assert "178 of 178 parameter elements" in finding.evidence


def test_a_model_cast_after_it_was_attached_is_found() -> None:
    model = perceptron()
    watch = gpuwatch.attach(model)
    model.double()
    assert found(watch.findings(), RULE)
    watch.detach()


def test_a_model_cast_back_after_it_was_attached_is_quiet() -> None:
    model = perceptron().double()
    watch = gpuwatch.attach(model)
    model.float()
    assert not found(watch.findings(), RULE)
    watch.detach()


def test_float64_by_default_dtype_is_a_choice() -> None:
    torch.set_default_dtype(torch.float64)
    assert not found(train(60, model=perceptron(), loader=wide_loader(60)), RULE)


def test_a_small_layer_in_float64_is_a_choice() -> None:
    model = nn.ModuleList([nn.Linear(100, 100), nn.Linear(2, 2).double()])
    watch = gpuwatch.attach(model)
    assert not found(watch.findings(), RULE)
    watch.detach()


def test_buffers_and_half_precision_are_quiet() -> None:
    model = perceptron().bfloat16()
    model.register_buffer("statistics", torch.zeros(10_000, dtype=torch.float64))
    watch = gpuwatch.attach(model)
    assert not found(watch.findings(), RULE)
    watch.detach()


def test_a_model_without_parameters_yet_is_quiet() -> None:
    watch = gpuwatch.attach(nn.Sequential(nn.LazyLinear(4), nn.Identity()))
    assert watch.run is not None
    assert watch.findings() == []
    watch.detach()
