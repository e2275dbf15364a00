"""Padding in batches: what the attention mask leaves out, read at looks and without a trace."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, default_collate

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch_hooks.batches import Batches, padding
from tests.loops import found, only

pytestmark = pytest.mark.usefixtures("records")

RULE = "data-padding-waste"
LENGTH = 32


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of so many tokens, padded to 32."""

    def __init__(self, tokens: int, kind: torch.dtype = torch.long) -> None:
        self.tokens = tokens
        self.kind = kind

    def __len__(self) -> int:
        return 280

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(LENGTH) < self.tokens).to(self.kind)
        return {"input_ids": torch.full((LENGTH,), index % 50) * mask.long(), "attention_mask": mask}


class Encoding(UserDict[str, torch.Tensor]):
    """A batch as tokenizers make it."""


def encoded(items: list[dict[str, torch.Tensor]]) -> Encoding:
    """Such a batch."""
    return Encoding(default_collate(items))


def nested(items: list[dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs and a target."""
    return default_collate(items), torch.zeros(len(items))


def trained(
    dataset: Tokens,
    collate: Callable[..., Any] | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    workers: int = 0,
) -> list[Finding]:
    """Seventy steps on these batches."""
    model = nn.Sequential(nn.EmbeddingBag(50, 8), nn.Linear(8, 1))
    loader: Any = DataLoader(dataset, batch_size=4, collate_fn=collate, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    with around():
        for batch in loader:
            inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
            optimizer.zero_grad()
            model(inputs["input_ids"]).square().mean().backward()
            optimizer.step()
    watch.detach()
    return watch.findings()


@pytest.mark.parametrize("collate", [None, encoded, nested], ids=["dict", "encoding", "tuple"])
def test_mostly_padding_is_found(collate: Callable[..., Any] | None) -> None:
    finding = only(trained(Tokens(8), collate), RULE)
    assert finding.severity == "info" and finding.evidence.startswith("75 % of the tokens")
    assert finding.gain_bound == pytest.approx(4.0)


def test_masks_of_booleans_from_workers_are_read_too() -> None:
    assert only(trained(Tokens(16, torch.bool), workers=1), RULE).evidence.startswith("50 %")


def test_sequences_of_like_length_are_quiet() -> None:
    assert not found(trained(Tokens(30)), RULE)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.ones(4, 8)},
        {"attention_mask": torch.zeros(4, 8)},  # of floats: it may be a bias
        {"attention_mask": torch.zeros(4, 1, 8, 8, dtype=torch.bool)},
        {"attention_mask": torch.zeros(0, 8, dtype=torch.bool)},
        {"attention_mask": torch.zeros(4, 8, dtype=torch.bool, device="meta")},
        {"attention_mask": [[1, 1, 0]]},
        torch.ones(4, 8),
        None,
    ],
    ids=["none", "float", "four dimensions", "empty", "elsewhere", "list", "tensor", "nothing"],
)
def test_a_batch_without_a_usual_mask_tells_nothing(batch: object) -> None:
    assert padding(batch) is None


class Functions(TorchFunctionMode):
    """Notes every function of torch that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*arguments, **(options or {}))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("make", [Functions, Operators])
def test_a_mode_of_the_users_sees_nothing_of_it(make: Callable[[], Functions | Operators]) -> None:
    batch = {"attention_mask": torch.zeros(4, 8, dtype=torch.bool)}
    batches, mode = Batches(), make()
    with mode:
        batches.look(batch, on_accelerator=True)
    assert not mode.seen and not dict(batches.readings())
    for _ in range(4):
        batches.look(batch, on_accelerator=False)
    assert dict(batches.readings())


def test_reading_a_mask_draws_no_random_number_and_keeps_no_batch() -> None:
    state, batch = torch.random.get_rng_state(), {"attention_mask": torch.zeros(4, 8, dtype=torch.bool)}
    batches = Batches()
    batches.look(batch, on_accelerator=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(isinstance(kept, torch.Tensor) for kept in vars(batches).values())
