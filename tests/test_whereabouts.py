"""What a rank among several tells of its place in a step: as autograd begins and returns, as optimizers step."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpuwatch.layout import BACKWARD_BITS, PLACE_BITS, Place, State, Word
from gpuwatch.record import RecordWriter
from gpuwatch_hooks import whereabouts
from gpuwatch_hooks.backward import NAMES
from gpuwatch_hooks.pace import Pace


@pytest.fixture
def pace(tmp_path: Path) -> Iterator[Pace]:
    """That of one of two ranks, with every backward told of."""
    record = RecordWriter(tmp_path, {"run": "r", "rank": 0, "world_size": 2})
    pace = Pace(record)
    restore = whereabouts.install(SimpleNamespace(pace=pace, close_look=lambda: None))  # type: ignore[arg-type]
    yield pace
    restore()
    record.close(State.CLEAN)


def place(pace: Pace) -> tuple[int, int, Place]:
    """Steps, backwards of the step, and what was done last."""
    word = pace.words[Word.PLACE]
    above = word >> PLACE_BITS
    return above >> BACKWARD_BITS, above & (1 << BACKWARD_BITS) - 1, Place(word & (1 << PLACE_BITS) - 1)


class Within(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.call()
        return gradient, None


def backward(call: Any) -> None:
    Within.apply(torch.ones(1, requires_grad=True), call).sum().backward()  # type: ignore[no-untyped-call]


def test_backwards_are_counted_until_an_optimizer_has_stepped(pace: Pace) -> None:
    seen = []
    for _ in range(2):
        backward(lambda: seen.append(place(pace)))
        seen.append(place(pace))
    pace.stepped(1)
    seen.append(place(pace))
    backward(lambda: None)
    pace.stepped(1)  # another optimizer in the same step
    seen.append(place(pace))
    assert seen == [
        (0, 0, Place.BACKWARD),
        (0, 1, Place.STEPPED),
        (0, 1, Place.BACKWARD),
        (0, 2, Place.STEPPED),
        (1, 0, Place.STEPPED),
        (1, 1, Place.STEPPED),
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python keeps the frame")
def test_what_is_raised_in_a_backward_has_the_frames_it_has_without(pace: Pace) -> None:
    def fail() -> None:
        raise ValueError("in backward")

    with pytest.raises(ValueError, match="in backward") as caught:
        backward(fail)
    frames = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert frames[-1] == "fail" and "told_backward" not in frames
    assert place(pace) == (0, 1, Place.STEPPED)


def test_autograd_is_put_back_as_it_was(tmp_path: Path) -> None:
    originals = [getattr(torch.autograd, name) for name in NAMES]
    record = RecordWriter(tmp_path, {"run": "r", "rank": 0})
    session = SimpleNamespace(pace=Pace(record), close_look=lambda: None)
    restore = whereabouts.install(session)  # type: ignore[arg-type]
    assert [getattr(torch.autograd, name) for name in NAMES] != originals
    restore()
    assert [getattr(torch.autograd, name) for name in NAMES] == originals
    record.close(State.CLEAN)
