"""Leaks are found, and what holds them is named; what only looks like one stays quiet."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpuwatch.advisor import Finding
from tests.loops import Batch, loader_of, perceptron, train
from tests.test_leak_holders import unhurried

__all__ = ["unhurried"]

pytestmark = pytest.mark.usefixtures("records", "unhurried")

STEPS = 150
FEATURES = 64
BATCH = 256
LEAKS = {"leak-graph-retained", "leak-tensors", "leak-host", "leak-cyclic", "leak-device"}


def leaks(after: Any, steps: int = STEPS, **options: Any) -> list[Finding]:
    """The leak findings of a loop that does this after each step."""
    options.setdefault("loader", loader_of(steps, BATCH, FEATURES))
    options.setdefault("model", perceptron(FEATURES))
    return [finding for finding in train(steps, after=after, **options) if finding.rule in LEAKS]


def named(findings: list[Finding], name: str) -> bool:
    """Whether one of them names this holder, with its growth."""
    return any(name in finding.where and " a step" in finding.evidence for finding in findings)


def wide() -> torch.Tensor:
    """A tensor of 64 KiB."""
    return torch.zeros(128, 128)


@dataclass
class Meter:
    """Keeps what it is given."""

    values: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def test_a_list_of_losses_is_named() -> None:
    history: list[torch.Tensor] = []
    findings = leaks(lambda step, output, loss: history.append(loss))
    assert findings[0].rule == "leak-graph-retained"
    assert "test_probe_leaks.py" in " ".join(finding.where for finding in findings) and named(findings, "history")


def test_a_list_of_numbers_is_quiet() -> None:
    history: list[float] = []
    assert not leaks(lambda step, output, loss: history.append(loss.item()))


def test_an_exponential_average_that_keeps_its_graph_is_named() -> None:
    average: dict[str, torch.Tensor] = {"loss": torch.zeros(())}

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        average["loss"] = 0.9 * average["loss"] + 0.1 * loss

    assert named(leaks(after), "average['loss']")


def test_a_detached_average_is_quiet() -> None:
    average: dict[str, torch.Tensor] = {"loss": torch.zeros(())}

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        average["loss"] = 0.9 * average["loss"] + 0.1 * loss.detach()

    assert not leaks(after)


def test_a_meter_with_a_list_for_each_name_is_named_to_the_entry() -> None:
    meter = Meter()
    assert named(leaks(lambda step, output, loss: meter.values["wide"].append(wide())), "meter.values['wide']")


def test_an_object_with_slots_is_named() -> None:
    slotted = Slotted()
    assert named(leaks(lambda step, output, loss: slotted.kept.append(wide())), "slotted.kept")


def test_an_ordered_dictionary_by_step_is_named() -> None:
    outputs: OrderedDict[int, torch.Tensor] = OrderedDict()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        outputs[step] = wide()

    assert named(leaks(after), "outputs")


def test_a_dictionary_that_keeps_the_last_few_is_quiet() -> None:
    outputs: OrderedDict[int, torch.Tensor] = OrderedDict()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        outputs[step] = wide()
        if len(outputs) > 20:
            outputs.popitem(last=False)

    assert not leaks(after)


def test_a_closure_is_named() -> None:
    def remember() -> Any:
        cells: list[torch.Tensor] = []
        return lambda step, output, loss: cells.append(wide())

    assert named(leaks(remember()), "cells")


def test_a_partial_with_its_list_is_named() -> None:
    def keep(into: list[torch.Tensor], step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        into.append(wide())

    kept = functools.partial(keep, [])
    assert named(leaks(kept), ".args")


def test_a_slice_counts_with_the_storage_it_keeps() -> None:
    corners: list[torch.Tensor] = []
    findings = leaks(lambda step, output, loss: corners.append(wide()[:1, :1]))
    assert named(findings, "corners") and "64 KiB a step" in findings[0].evidence


def test_small_clones_of_slices_are_quiet() -> None:
    corners: list[torch.Tensor] = []
    assert not leaks(lambda step, output, loss: corners.append(wide()[:1, :1].clone()))


def test_numpy_views_are_named() -> None:
    rows: list[dict[str, Any]] = []
    findings = leaks(lambda step, output, loss: rows.append({"step": step, "row": wide().numpy()[0]}))
    assert named(findings, "rows")


def test_forward_hook_state_is_named() -> None:
    model = perceptron(FEATURES)
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert named(leaks(lambda step, output, loss: None, model=model), "seen")


def test_a_buffer_that_fills_up_is_quiet() -> None:
    queue: deque[torch.Tensor] = deque(maxlen=30)
    assert not leaks(lambda step, output, loss: queue.append(output.detach()))


def test_an_epoch_buffer_that_is_cleared_is_quiet() -> None:
    losses: list[torch.Tensor] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        losses.append(loss)
        if step % 20 == 19:
            torch.stack(losses).mean().item()
            losses.clear()

    assert not leaks(after)


def test_a_best_state_is_quiet() -> None:
    best: dict[str, Any] = {}

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step % 10 == 0:
            best["state"] = {"loss": loss.detach(), "weights": [wide() for _ in range(4)]}

    assert not leaks(after)


class Caching(Dataset[Batch]):
    """Caches what it makes, by a key that repeats or not."""

    def __init__(self, bounded: bool) -> None:
        self.bounded = bounded
        self.made = itertools.count()
        self.cache: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Batch:
        key = index if self.bounded else next(self.made)
        if key not in self.cache:
            self.cache[key] = torch.zeros(FEATURES, 64)
        return self.cache[key][:, 0], torch.zeros(2)


def test_a_data_set_that_caches_for_ever_is_named() -> None:
    loader = DataLoader(Caching(bounded=False), batch_size=8)
    assert named(leaks(lambda step, output, loss: None, loader=loader), "cache")


def test_a_data_set_that_caches_each_item_once_is_quiet() -> None:
    loader = DataLoader(Caching(bounded=True), batch_size=8)
    assert not leaks(lambda step, output, loss: None, loader=loader)


class Hoarding(torch.autograd.Function):
    """Stores its output on the context: a cycle through native code."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        ctx.output = inputs * 2
        return ctx.output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


class Frugal(Hoarding):
    """Saves it as autograd wants it saved."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        output = inputs * 2
        ctx.save_for_backward(output)
        return output


class Applied(nn.Module):
    """A layer of one of these."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.function.apply(inputs)  # type: ignore[no-untyped-call]
        return output


@pytest.mark.parametrize(("function", "fires"), [(Hoarding, True), (Frugal, False)])
def test_a_context_that_keeps_its_output_is_garbage_in_cycles(
    function: type[torch.autograd.Function], fires: bool
) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 256), Applied(function), nn.Linear(256, 2))
    findings = leaks(lambda step, output, loss: [object() for _ in range(200)], model=model)
    assert any(finding.rule in ("leak-cyclic", "leak-host") for finding in findings) is fires


def test_hostile_objects_are_left_alone() -> None:
    class Hostile:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __len__(self) -> int:
            raise RuntimeError("len")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("eq")

        __hash__ = None  # type: ignore[assignment]

    class HostileDict(dict[str, Any]):
        def values(self) -> Any:
            raise RuntimeError("values")

        def __iter__(self) -> Any:
            raise RuntimeError("iter")

    class HostileTensor(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *arguments: Any, **options: Any) -> Any:
            raise RuntimeError("torch function")

    things = [
        Hostile(),
        HostileDict(one=wide()),
        wide().as_subclass(HostileTensor),
        wide().to_sparse(),
        {"it": Hostile()},
    ]
    assert not leaks(lambda step, output, loss: len(things))


def test_variables_are_not_kept_alive_by_the_search(tmp_path: Path) -> None:
    import weakref

    import gpuwatch

    model, loader = perceptron(FEATURES), loader_of(40, 8, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gpuwatch.attach(model, loader):
        for inputs, targets in loader:
            optimizer.zero_grad()
            scratch = wide()
            gone = weakref.ref(scratch)
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            del scratch
            assert gone() is None
