"""Memory by module against models counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.catalog import MEMORY_PARTS, MODULE_MEMORY
from gpuwatch_hooks import attach, modules
from tests.loops import found, only
from tests.measured import BATCH, LENGTH, TOKENS, WIDTH, F, Named, Stack, one_measurement, run

__all__ = ["one_measurement"]

pytestmark = pytest.mark.usefixtures("records", "one_measurement")


def test_a_perceptron_counted_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    seen = run(model, torch.randn(32, 8), kind=torch.optim.Adam)
    # the first layer keeps the batch; the second keeps the ReLU's result, which the ReLU kept before it
    assert seen.saved() == {"*": 32 * 8 * F + 32 * 16 * F}
    weights = (8 * 16 + 16 + 16 * 2 + 2) * F
    assert (seen.part("parameters"), seen.part("gradients")) == (weights, weights)
    assert seen.part("optimizer") == 2 * weights + 4 * F  # two moments, and a step for each of four tensors
    assert seen.part("activations") == 32 * 8 * F + 32 * 16 * F


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
    shown = {key for key in seen.values if key.startswith(MODULE_MEMORY.name)}
    assert len(shown) == 11 and any("_other" in key for key in shown) and any("part_p" in key for key in shown)
    assert sum(seen.values[key] for key in shown) == sum(seen.part(part) or 0 for part in MEMORY_PARTS)
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
