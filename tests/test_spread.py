"""Times told by quantiles and a mean."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from gpuwatch.spread import TIMES, cut, spread

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def quantiles(times: list[float]) -> dict[float, float]:
    """Of these times, by nearest rank."""
    ordered = sorted(times)
    return {share: ordered[int(share * len(ordered))] for share in SHARES}


def rarely(share: float) -> Callable[[random.Random], float]:
    """Ten times as long in this share of cases."""
    return lambda draw: 0.1 if draw.random() < share else 0.01


@pytest.mark.parametrize("share", [0.0, 0.03, 0.06, 0.1, 0.2, 0.4])
def test_the_mean_decides_what_lies_between_two_quantiles(share: float) -> None:
    draw = random.Random(1)
    times = [rarely(share)(draw) for _ in range(3000)]
    told = spread(quantiles(times), statistics.fmean(times))
    assert statistics.fmean(told) == pytest.approx(statistics.fmean(times), rel=0.03)
    assert statistics.pstdev(told) == pytest.approx(statistics.pstdev(times), rel=0.2)


def test_quantiles_without_a_mean_are_joined_by_straight_lines() -> None:
    draw = random.Random(1)
    times = [draw.uniform(0.01, 0.02) for _ in range(3000)]
    assert statistics.fmean(spread(quantiles(times))) == pytest.approx(0.015, rel=0.03)


def test_a_median_alone_is_enough() -> None:
    assert spread({0.5: 0.02}) == (0.02,) * TIMES
    assert spread({0.5: 0.02}, 0.5) == (0.02,) * TIMES


def test_quantiles_out_of_order_and_means_out_of_reach_give_sorted_times() -> None:
    for mean in (0.0, 1.0, 100.0):
        told = spread({0.1: 3.0, 0.5: 1.0, 0.9: 2.0, 0.99: 8.0}, mean)
        assert list(told) == sorted(told) and told[-1] <= 8.0


def test_cutting_takes_from_the_longest() -> None:
    assert cut((1.0, 2.0, 3.0, 10.0), 3.0) == pytest.approx((1.0, 2.0, 3.0, 6.0))
    assert cut((1.0, 2.0, 3.0, 10.0), 2.0) == pytest.approx((1.0, 2.0, 2.5, 2.5))
    assert cut((1.0, 2.0, 3.0, 10.0), 0.5) == pytest.approx((0.5,) * 4)


@pytest.mark.parametrize("mean", [0.0, 4.0, 9.0])
def test_cutting_never_adds(mean: float) -> None:
    times = (1.0, 2.0, 3.0, 10.0)
    assert all(after <= before for before, after in zip(times, cut(times, mean), strict=True))
    assert statistics.fmean(cut(times, mean)) == pytest.approx(min(mean, 4.0))
