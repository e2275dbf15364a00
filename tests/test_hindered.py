"""Slow steps that are waits for another rank's slow steps are not told of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpuwatch.hindered import without_waits


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (["other", "backward", "backward"], [0]),
        (["backward", "data"], [1]),
        (["backward", "backward"], [0, 1]),  # nobody knows whose
        (["backward"], [0]),
        (["other", "forward"], [0, 1]),
    ],
)
def test_who_waits_for_a_slow_rank_is_not_slow(places: list[str], told: list[int]) -> None:
    found = [
        (SimpleNamespace(rule="comp-step-jitter", where=f"phase: {place}"), rank) for rank, place in enumerate(places)
    ]
    other = (SimpleNamespace(rule="debug-anomaly", where="phase: backward"), 9)
    assert [rank for _, rank in without_waits([*found, other])] == [*told, 9]
