"""The small tree of conditions: what it computes, and what it writes for Prometheus."""

from __future__ import annotations

import math

import pytest

from gpuwatch.expr import (
    AverageOverTime,
    Condition,
    Const,
    Expr,
    History,
    Metric,
    Observed,
    Rate,
    Samples,
    escape,
    lift,
    series_key,
)

GAUGE = Metric("m_age_seconds", "gauge", "seconds", "A gauge.")
COUNTER = Metric("m_work_seconds_total", "counter", "seconds", "A counter.", labels=("phase",))
QUANTILES = Metric("m_step_seconds", "gauge", "seconds", "Quantiles.", labels=("quantile",))
SEEN = Metric("m_observation", "gauge", "1", "Observations.", labels=("rule", "where"))
ON = ("instance", "run", "rank")


def once(**values: float) -> History:
    return {f"m_{name}": [(0.0, value)] for name, value in values.items()}


def minutes(*values: float) -> Samples:
    return [(60.0 * index, value) for index, value in enumerate(values)]


def phases(**seconds: Samples) -> dict[str, Samples]:
    return {series_key(COUNTER.name, {"phase": phase}): samples for phase, samples in seconds.items()}


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_series_key_sorts_and_escapes_its_labels() -> None:
    assert series_key("m") == "m"
    assert series_key("m", {"b": "2", "a": "1"}) == 'm{a="1",b="2"}'
    assert series_key("m", {"a": 'x"\\\n'}) == 'm{a="x\\"\\\\\\n"}'
    assert escape("plain") == "plain"


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2.0 * 2**30, 0.1, 5e-05, 300.0, -1.0, 1 / 3, 123456789.0])
def test_a_constant_is_the_same_number_in_both_readings(number: float) -> None:
    assert float(Const(number).promql()) == number == Const(number).value({})


def test_a_whole_constant_is_written_without_a_point() -> None:
    assert (Const(300.0).promql(), lift(10).promql()) == ("300", "10")


def test_a_missing_signal_is_unknown_and_so_is_all_that_is_made_of_it() -> None:
    for expr in (GAUGE, GAUGE + 1, Const(1) - GAUGE, GAUGE * 2, GAUGE / 3, Rate(COUNTER), AverageOverTime(GAUGE)):
        assert expr.value({}) is None
        assert (expr > 0).holds({}) is None


def test_division_by_zero_is_unknown_in_python_and_left_out_for_prometheus() -> None:
    share = GAUGE / Metric("m_all", "gauge", "1", "A gauge.")
    assert share.value(once(age_seconds=1, all=0)) is None
    assert share.promql() == "(m_age_seconds / (m_all != 0))"
    assert (GAUGE / 2).promql() == "(m_age_seconds / 2)"


def test_arithmetic_is_as_usual() -> None:
    history = once(age_seconds=6)
    numbers = [expr.value(history) for expr in (GAUGE + 1, GAUGE - 1, GAUGE * 2, GAUGE / 4)]
    assert numbers == [7, 5, 12, 1.5]
    assert ((GAUGE + 1) * 2).promql() == "((m_age_seconds + 1) * 2)"


def test_several_series_are_summed_for_counters_and_the_largest_counts_for_gauges() -> None:
    assert COUNTER.value(phases(data=minutes(1), forward=minutes(2))) == 3
    assert COUNTER.promql() == "sum without (phase) (m_work_seconds_total)"
    both = {series_key(QUANTILES.name, {"quantile": name}): minutes(value) for name, value in (("0.5", 1), ("0.9", 4))}
    assert QUANTILES.value(both) == 4
    assert QUANTILES.where(quantile="0.5").value(both) == 1
    assert QUANTILES.where(quantile="0.5").promql() == 'max without (quantile) (m_step_seconds{quantile="0.5"})'


def test_an_observation_keeps_its_place() -> None:
    seen = Observed(SEEN, "leak")
    history = {
        series_key(SEEN.name, {"rule": "leak", "where": "a.py:1"}): minutes(3),
        series_key(SEEN.name, {"rule": "leak", "where": "b.py:2"}): minutes(9),
        series_key(SEEN.name, {"rule": "other", "where": "c.py:3"}): minutes(50),
    }
    assert seen.value(history) == 9
    assert seen.promql() == 'm_observation{rule="leak"}'
    assert seen.metrics() == {"m_observation"}


def test_a_rate_needs_two_samples_and_takes_a_fall_for_a_reset() -> None:
    rate = Rate(COUNTER.where(phase="data"))
    assert rate.value(phases(data=minutes(5))) is None
    assert rate.value(phases(data=minutes(0, 60, 120))) == 1
    assert rate.value(phases(data=minutes(0, 60, 0, 60))) == pytest.approx(120 / 180)
    assert rate.value(phases(data=[(1.0, 0.0), (1.0, 9.0)])) is None
    assert Rate(COUNTER).value(phases(data=minutes(0, 60), forward=minutes(0, 120))) == 3
    assert rate.promql() == 'sum without (phase) (rate(m_work_seconds_total{phase="data"}[5m]))'


def test_an_average_leaves_out_what_is_older_than_its_minutes() -> None:
    history = {GAUGE.name: minutes(100, 100, 1, 1, 1)}
    assert AverageOverTime(GAUGE, 3).value(history) == 1
    assert AverageOverTime(GAUGE, 3).promql() == "avg_over_time(m_age_seconds[3m])"


# -- conditions --------------------------------------------------------------------------------------------------------

YES, NO, UNKNOWN = Const(1) > 0, Const(0) > 1, GAUGE > 0


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (GAUGE > 3, False), (GAUGE >= 3, True), (GAUGE < 3, False), (GAUGE <= 3, True), (GAUGE.equals(3), True),
        (GAUGE.equals(2), False), (GAUGE >= GAUGE * 2, False),
    ],
)  # fmt: skip
def test_comparisons(condition: Condition, expected: bool) -> None:
    assert condition.holds(once(age_seconds=3)) is expected


def test_a_comparison_with_what_is_not_a_number_is_unknown() -> None:
    assert (GAUGE > 3).holds(once(age_seconds=math.nan)) is None


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (YES & YES, True), (YES & NO, False), (NO & UNKNOWN, False), (UNKNOWN & NO, False), (YES & UNKNOWN, None),
        (NO | NO, False), (NO | YES, True), (YES | UNKNOWN, True), (UNKNOWN | YES, True), (NO | UNKNOWN, None),
        (YES.unless(NO), True), (YES.unless(YES), False), (YES.unless(UNKNOWN), True), (NO.unless(YES), False),
        (UNKNOWN.unless(NO), None), (UNKNOWN.unless(YES), None),
    ],
)  # fmt: skip
def test_joined_conditions_know_what_they_cannot_know(condition: Condition, expected: bool | None) -> None:
    assert condition.holds({}) is expected


def test_joined_conditions_are_matched_by_their_owner() -> None:
    text = ((GAUGE > 1) & (GAUGE < 9)).promql(ON)
    assert text == "(m_age_seconds > 1)\nand on (instance, run, rank)\n(m_age_seconds < 9)"
    assert "\nunless on (instance, run, rank)\n" in (GAUGE > 1).unless(GAUGE > 9).promql(ON)
    assert ((GAUGE > 1) | (GAUGE < 0)).promql(ON) == "(m_age_seconds > 1)\nor\n(m_age_seconds < 0)"


def test_a_condition_names_every_metric_it_reads() -> None:
    condition = ((GAUGE > 1) & (Rate(COUNTER) > 0)).unless(AverageOverTime(QUANTILES) > Const(2))
    assert condition.metrics() == {GAUGE.name, COUNTER.name, QUANTILES.name}
    assert Const(1).metrics() == frozenset()


def test_the_bases_are_only_a_form() -> None:
    for call in (lambda: Expr().value({}), lambda: Expr().promql(), lambda: Expr().metrics()):
        with pytest.raises(NotImplementedError):
            call()
    for call in (lambda: Condition().holds({}), lambda: Condition().promql(ON), lambda: Condition().metrics()):
        with pytest.raises(NotImplementedError):
            call()
