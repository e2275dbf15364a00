"""Memory by module against models counted by hand; and training is the same to the last bit while it is measured."""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch.catalog import MODEL_MEMORY, MODULE_MEMORY
from gpuwatch.expr import series_key
from gpuwatch.report.document import document
from gpuwatch_hooks import attach, guard, modules, saved
from tests.loops import found, only

pytestmark = pytest.mark.usefixtures("records")
F = 4
"""Bytes of a float."""

Loss = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def one_measurement_at_step_two(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_perceptron_counted_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    seen = run(model, torch.randn(32, 8), kind=torch.optim.Adam)
    # the first layer keeps the batch; the second keeps the ReLU's result, which the ReLU kept before it
    assert seen.saved() == {"*": 32 * 8 * F + 32 * 16 * F}
    weights = (8 * 16 + 16 + 16 * 2 + 2) * F
    assert (seen.part("parameters"), seen.part("gradients")) == (weights, weights)
    assert seen.part("optimizer") == 2 * weights + 4 * F  # two moments, and a step for each of four tensors
    assert seen.part("activations") == 32 * 8 * F + 32 * 16 * F


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


def test_a_convolution_net_counted_by_hand() -> None:
    seen = run(Named(), torch.randn(2, 3, 8, 8))
    image = 2 * 8 * 8 * F
    assert seen.saved() == {
        "conv": 3 * image,  # the batch
        "norm": 4 * image + 2 * 4 * F,  # the convolution's result, mean and deviation of the batch
        "act": 4 * image,  # its own result, which the pool keeps too
        "pool": 2 * 4 * 4 * 4 * 8,  # where the largest were, as integers of eight bytes
        "head": 2 * 4 * 4 * 4 * F,
    }
    reached = [seen.rows[name]["reached_bytes"] for name in ("conv", "norm", "act", "pool", "head")]
    assert reached == sorted(reached) and reached[-1] == sum(seen.saved().values())


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


BATCH, LENGTH, WIDTH = 2, 6, 8
TOKENS = BATCH * LENGTH * WIDTH * F


def test_transformer_blocks_counted_by_hand_and_folded() -> None:
    seen = run(Stack(3, WIDTH), torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True))
    assert seen.saved() == {
        "layers.*.norm": 3 * (TOKENS + 2 * BATCH * LENGTH * F),  # its input, mean and deviation of each token
        "layers.*.project": 3 * TOKENS,
        "layers.*": 3 * (3 * TOKENS + BATCH * LENGTH * LENGTH * F),  # q, k and v in one, the attention weights
        "layers.*.out": 3 * TOKENS,
        "layers.*.up": 3 * TOKENS,
        "layers.*.act": 3 * 4 * TOKENS,
        "layers.*.down": 3 * 4 * TOKENS,
    }
    assert seen.rows["layers.*.up"]["modules"] == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_keep_their_inputs_alone(reentrant: bool) -> None:
    inputs = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    seen = run(Stack(3, WIDTH, checkpointed=True, reentrant=reentrant), inputs)
    assert seen.part("activations") == 3 * TOKENS


class Tied(nn.Module):
    """A language model that embeds and answers with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores."""
        scores: torch.Tensor = self.head(self.embed(tokens))
        return scores


def test_tied_weights_are_counted_once_and_the_loss_has_a_row() -> None:
    tokens = torch.randint(0, 100, (4, 6))
    seen = run(Tied(), tokens, loss=lambda scores: nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()))
    assert seen.part("parameters") == seen.part("gradients") == 100 * 8 * F
    scores = 4 * 6 * 100 * F
    saved_bytes = seen.saved()
    assert saved_bytes["embed"] == 4 * 6 * 8 and saved_bytes["head"] == 4 * 6 * 8 * F
    assert saved_bytes["(loss)"] == scores + F  # log-probabilities and a weight; the targets are the batch's own


class Views(nn.Module):
    """Slices and expansions of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A sum over views."""
        whole = inputs * self.scale
        return whole[:, :4].exp().sum() + (whole[:, 4:8] ** 2).sum() + (whole[:1].expand(1000, 64) ** 2).sum()


def test_views_count_as_the_storage_that_they_keep_and_once() -> None:
    seen = run(Views(), torch.randn(16, 64))
    # the batch, the product (kept whole by two views of it), the exponential's result
    assert seen.saved() == {"(model)": 16 * 64 * F + 16 * 64 * F + 16 * 4 * F}


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


def test_the_ten_largest_are_series_and_the_rest_is_summed() -> None:
    class Many(nn.Module):
        """Parts of ever other names."""

        def __init__(self) -> None:
            super().__init__()
            for number in range(16):
                self.add_module(f"part_{chr(97 + number)}", nn.Linear(4 + number, 4 + number))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            """Each part on as many features as it takes."""
            parts = [part(inputs[:, : 4 + number]).sum() for number, part in enumerate(self.children())]
            return torch.stack(parts)

    seen = run(Many(), torch.randn(2, 20))
    shown = {key for key in seen.values if key.startswith(MODULE_MEMORY.name) and 'part="parameters"' in key}
    assert len(shown) == 11 and any("_other" in key for key in shown) and any("part_p" in key for key in shown)
    assert sum(seen.values[key] for key in shown) == seen.part("parameters")
    assert len(seen.rows) == 16


class Scale(nn.Module):
    """A cheap layer that keeps its input, and not its output."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The inputs, scaled."""
        return inputs * self.by


def test_activations_that_keep_their_input_too_are_told_and_those_in_place_are_not() -> None:
    def net(act: Callable[[], nn.Module]) -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(Scale(), act()) for _ in range(2)), Scale())

    inputs = torch.randn(4 << 20)
    finding = only(run(net(nn.LeakyReLU), inputs, steps=4).findings, "mem-inplace-activation")
    assert finding.where == "*.*" and "32 MiB" in finding.evidence
    for act in (lambda: nn.LeakyReLU(inplace=True), nn.ReLU):  # a ReLU keeps its result alone anyway
        assert not found(run(net(act), inputs, steps=4).findings, "mem-inplace-activation")


def test_steps_later_on_are_within_the_budget(records: Path) -> None:
    model = Named()
    watch = gpuwatch.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert attach._active is not None
    probe = attach._active.session.modules
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    assert probe.measured == 1 and probe.next_step >= modules.LATER_STEPS
    watch.detach()


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
