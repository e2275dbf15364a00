"""Padding in batches: what the attention mask leaves out, or what ends rows of ids; read without a trace."""

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
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import gpuwatch
from gpuwatch.advisor import Finding
from gpuwatch_hooks.batches import Batches, padding
from gpuwatch_hooks.padding import KINDS, padding_of_ids
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
    dataset: Dataset[Any],
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


def ids(longest: int, shortest: int = 5, pad: int = 0, length: int = 64, rows: int = 24) -> torch.Tensor:
    """Rows of so many tokens of a vocabulary, padded."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(10, 9000, (rows, length), generator=draw)
    lengths = torch.randint(shortest, longest + 1, (rows, 1), generator=draw)
    return tokens.masked_fill(torch.arange(length) >= lengths, pad)


def seen(*tensors: torch.Tensor) -> float | None:
    """What is published after some such batches."""
    batches = Batches()
    for _ in range(8):
        batches.look(tensors, on_accelerator=False)
    return dict(batches.readings()).get("gpuwatch_loader_padding_ratio")


@pytest.mark.parametrize("pad", [0, 1, -100, 9000], ids=["0", "1", "-100", "end of text"])
@pytest.mark.parametrize("side", ["after", "before"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_padding_is_told_without_a_mask(pad: int, side: str, kind: torch.dtype) -> None:
    tokens = ids(30, pad=pad).to(kind)
    padded = tokens if side == "after" else tokens.flip(1)
    expected = float((tokens == pad).float().mean())
    assert padding_of_ids([padded]) == pytest.approx(expected) and expected > 0.5
    assert seen(padded, torch.zeros(24)) == pytest.approx(expected)


def test_inputs_and_targets_are_taken_together() -> None:
    inputs, targets = ids(60, 50), ids(12)
    expected = float((torch.stack([inputs, targets]) == 0).float().mean())
    assert seen(inputs, targets) == pytest.approx(expected)


def test_labels_that_leave_out_the_prompt_do_not_count() -> None:
    inputs = ids(40)
    labels = inputs.masked_fill((inputs == 0) | (torch.arange(64) < 4), -100)
    assert seen(inputs, labels) == pytest.approx(float((inputs == 0).float().mean()))


def test_of_long_rows_a_few_are_enough() -> None:
    assert seen(ids(900, 500, length=1000, rows=400)) == pytest.approx(0.3, abs=0.15)


def test_batches_that_are_padded_now_and_then_count_among_the_others() -> None:
    batches = Batches()
    for number in range(80):
        batches.look([ids(20) if number % 16 == 0 else ids(64, 64)], on_accelerator=False)
    assert dict(batches.readings())["gpuwatch_loader_padding_ratio"] < 0.01


def counts() -> torch.Tensor:
    """Words counted, of a large vocabulary."""
    return torch.poisson(torch.full((24, 64), 0.3), generator=torch.Generator().manual_seed(1)).long() * 40


LOOK_ALIKES = {
    "no padding": ids(64, 64),
    "images": ids(40, 30) * (ids(64, 64) % 5 > 0),
    "classes, one hot": torch.eye(64, dtype=torch.long)[torch.arange(24)],
    "a scale": (torch.arange(64) < torch.arange(24)[:, None]).long(),
    "words, counted": counts(),
    "columns that are never filled": ids(40, 40),
    "few different values": ids(30) % 7 + (ids(30) > 0),
    "floats": ids(30).float(),
    "bytes": ids(30).clamp(0, 255).to(torch.uint8),
    "few columns": ids(8, 2, length=12),
    "one row": ids(30, rows=1),
    "three dimensions": ids(30).reshape(2, 12, 64),
    "no rows": ids(30)[:0],
    "elsewhere": ids(30).to("meta"),
}


@pytest.mark.parametrize("alike", LOOK_ALIKES)
def test_look_alikes_of_padded_ids_are_quiet(alike: str) -> None:
    assert seen(LOOK_ALIKES[alike]) is None


def test_captions_of_images_are_no_matter() -> None:
    assert seen(ids(30), torch.zeros(24, 3, 32, 32)) is None


def named(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch without a mask."""
    return {"input_ids": default_collate(rows)[0]}


def test_padding_without_a_mask_is_found_in_a_training() -> None:
    data = TensorDataset(ids(12, length=LENGTH, rows=280) % 50)
    finding = only(trained(data, named), RULE)
    assert finding.severity == "info" and "of the tokens" in finding.evidence
