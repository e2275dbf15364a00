"""The first promise: training with gpuwatch attached computes the same, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gpuwatch
from gpuwatch.reader import read_all
from tests.outcomes import outcome
from tests.trainings import TRAININGS


def nothing(*arguments: object, **options: object) -> None:
    """What a program without gpuwatch calls."""


@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_the_same_to_the_last_bit(name: str, records: Path) -> None:
    watches = []

    def attach(*arguments: Any) -> None:
        watches.append(gpuwatch.attach(*arguments))

    expected = outcome(TRAININGS[name], nothing)
    actual = outcome(TRAININGS[name], attach)
    for watch in watches:
        watch.detach()
    assert actual == expected
    (record,), rejected = read_all(records)
    assert not rejected
    # Without an optimizer the first 32 batches are waited for one; with torch.func the loop has no backward either.
    least = {"updates by hand": 70, "torch.func": 0}.get(name, 100)
    assert record.step >= least, "it was watched"


def test_the_comparison_notices_a_single_random_number(records: Path) -> None:
    def meddling(*arguments: object) -> None:
        torch.rand(1)

    expected = outcome(TRAININGS["LBFGS"], nothing)
    actual = outcome(TRAININGS["LBFGS"], meddling)
    assert all(expected[what] != actual[what] for what in ("computed", "torch generator"))
