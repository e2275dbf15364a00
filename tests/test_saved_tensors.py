"""While a model is measured training is the same to the last bit, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch_hooks import attach, guard, modules, saved
from tests.measured import BATCH, LENGTH, WIDTH, Named, Seen, Stack, one_measurement, run

__all__ = ["one_measurement"]

pytestmark = pytest.mark.usefixtures("records", "one_measurement")


def trained(model: nn.Module, watched: bool, penalty: bool = False) -> tuple[list[bytes], list[float]]:
    """Parameters and losses after some steps."""
    torch.manual_seed(1)
    inputs = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters())
    watch = gpuwatch.attach(model) if watched else None
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        output = model(nn.functional.dropout(inputs, 0.1))
        loss = output.square().mean()
        if penalty:
            (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if watch is not None:
        seen = Seen(watch)
        assert seen.part("activations")
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()], losses


@pytest.mark.parametrize("penalty", [False, True], ids=["plain", "second derivatives"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_training_is_the_same_to_the_last_bit(
    checkpointed: bool, penalty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.ModuleProbe, "_put_off", lambda probe: None)  # every step is measured
    model = Stack(2, WIDTH, checkpointed=checkpointed)
    other = copy.deepcopy(model)
    assert trained(model, watched=True, penalty=penalty) == trained(other, watched=False, penalty=penalty)


def test_a_change_in_place_is_still_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    watch = gpuwatch.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        output = model(torch.ones(2, 4))
        if step == 2:
            assert attach._active is not None and attach._active.session.modules.current is not None
            with torch.no_grad():
                output.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output.sum().backward()
        else:
            output.sum().backward()
        optimizer.step()
    watch.detach()


def test_the_users_own_hooks_on_saved_tensors_are_left_alone() -> None:
    seen = run(Named(), torch.randn(2, 3, 8, 8), around=torch.autograd.graph.save_on_cpu)
    assert seen.part("activations") is None
    taken = []

    def take(item: torch.Tensor) -> torch.Tensor:
        taken.append(item.shape)
        return item

    class Inner(nn.Module):
        """A part that packs what it saves."""

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            """Under hooks of its own."""
            with torch.autograd.graph.saved_tensors_hooks(take, lambda item: item):
                answer: torch.Tensor = self.line(inputs)
            return answer

    assert run(nn.Sequential(Inner()), torch.randn(2, 4)).part("activations") is None
    assert len(taken) == 5  # each forward's input


def test_a_model_that_uses_functorch_works_on() -> None:
    class Slope(nn.Module):
        """Its answer is a derivative."""

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            """The slope at the inputs."""
            slope: torch.Tensor = torch.func.grad(lambda point: self.line(point).square().sum())(inputs)
            answer: torch.Tensor = self.line(inputs)
            return slope + answer

    before = torch._C._autograd._saved_tensors_hooks_disable
    seen = run(Slope(), torch.randn(3, 4))
    assert seen.part("activations") is None
    assert torch._C._autograd._saved_tensors_hooks_disable is before


def test_parameters_with_attributes_of_their_own_are_not_touched() -> None:
    model = Named()
    model.head.weight.main_grad = None  # type: ignore[attr-defined]
    assert run(model, torch.randn(2, 3, 8, 8)).part("activations") is None


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    class Moody(nn.Module):
        """Raises once."""

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            """Not at the third call."""
            self.calls += 1
            answer: torch.Tensor = self.line(inputs)
            if self.calls == 3:
                raise ValueError("not now")
            return answer

    model = Moody()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = gpuwatch.attach(model)
    for _ in range(6):
        with contextlib.suppress(ValueError):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    watch.detach()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not model.line._forward_hooks and not model.line._forward_pre_hooks


def test_nothing_stays_on_the_model_and_nothing_is_kept_alive() -> None:
    model = Stack(2, WIDTH)
    gone: list[weakref.ref[torch.Tensor]] = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        gone.append(weakref.ref(output))
        return output.square().sum()

    run(model, torch.randn(BATCH, LENGTH, WIDTH), loss=loss)
    assert [reference() for reference in gone] == [None] * 5
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert pickle.loads(pickle.dumps(model)) is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.faults_expected
def test_a_measurement_that_fails_is_taken_out_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tensor: torch.Tensor) -> int:
        raise ValueError("a tensor of an unknown kind")

    monkeypatch.setattr(saved, "storage_of", broken)
    run(Stack(2, WIDTH), torch.randn(BATCH, LENGTH, WIDTH))
    assert guard.faults()["modules"] == guard.LIMIT
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_model_that_goes_while_it_is_measured_is_not_held() -> None:
    model = Named()
    watch = gpuwatch.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        output = model(torch.randn(2, 3, 8, 8))
        if step < 2:
            output.sum().backward()
            optimizer.step()
    assert attach._active is not None and attach._active.session.modules.current is not None
    gone = weakref.ref(model)
    del model, optimizer, output
    assert gone() is None
    watch.detach()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
