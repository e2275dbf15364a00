"""Garbage collections that stop the loop, and such as do not matter."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

from tests.loops import found, only, train

pytestmark = pytest.mark.usefixtures("records")

RULE = "comp-gc-pause"


class Slow:
    """Takes a while to be collected: a pause of a known length, however many objects the test process has."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.003)


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1).step()  # imports what torch puts off until then
    gc.collect()
    gc.freeze()  # a collection then costs what the test's own objects cost
    yield
    gc.unfreeze()


def collect_slowly(step: int) -> None:
    Slow()
    gc.collect()


@pytest.mark.parametrize("first", [0, 100])
def test_collecting_at_every_step_is_found_with_its_line(first: int) -> None:
    finding = only(train(first + 100, before=lambda step: collect_slowly(step) if step >= first else None), RULE)
    line = collect_slowly.__code__.co_firstlineno + 2
    assert finding.where == f"test_probe_pauses.py:{line} (collect_slowly)"
    assert "began at this line" in finding.evidence


def test_cheap_collections_now_and_then_are_quiet() -> None:
    def work(step: int) -> None:
        time.sleep(0.002)
        if step % 50 == 49:
            gc.collect()

    assert not found(train(200, before=work), RULE)


def test_one_automatic_collection_is_quiet() -> None:
    Slow()
    assert not found(train(100, before=lambda step: gc.collect() if step == 50 else None), RULE)


def test_collections_of_the_younger_generations_are_quiet() -> None:
    assert not found(train(100, before=lambda step: gc.collect(0)), RULE)


def test_collections_outside_the_steps_are_quiet() -> None:
    for _ in range(10):
        collect_slowly(0)
    assert not found(train(100), RULE)
