"""A run against the earlier runs of its experiment, from what Prometheus remembers of them.

Prometheus computes first what each run of an experiment is like (:data:`RECORDS`), then the median of those that have
ended. The same limits serve ``gpuwatch compare``.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuwatch.catalog import (
    DEVICE_ACTIVE_PEAK,
    EARLIER_PEAK,
    EARLIER_STEP_SECONDS,
    EARLIER_WAIT,
    PHASE_SECONDS,
    RANK_INFO,
    WINDOW_STEP_SECONDS,
)
from gpuwatch.expr import Across, Expr, Metric, Quantity, series_key
from gpuwatch.limits import (
    REGRESSION_DAYS,
    REGRESSION_MEMORY_RATIO,
    REGRESSION_STEP_RATIO,
    REGRESSION_WAIT_POINTS,
)
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, of_ranks, one_minus, ramp
from gpuwatch.rulebook.waiting import WAIT_SHARE

_STEP = Across("max", WINDOW_STEP_SECONDS.where(quantile="0.5"))
_PEAK = Across("max", DEVICE_ACTIVE_PEAK)
_WAIT = Across("max", WAIT_SHARE)
_RATIO = _STEP / EARLIER_STEP_SECONDS


_MINUTES = 16  # of an example: the hold, and the window of a rate before it


def _now(metric: Metric) -> str:
    return f"experiment:{metric.name.replace('earlier_', '')}:now"


def _records(metric: Metric, of_rank: Expr) -> dict[str, str]:
    """What Prometheus records for this metric: each living run's own number, then that of the runs before it."""
    info = f'max by (instance, run, rank, experiment) ({RANK_INFO.name}{{experiment!=""}})'
    now = f"max by (run, experiment) ({of_rank.promql()} * on (instance, run, rank) group_left (experiment) {info})"
    # A run that lives is none of the earlier ones, itself least of all.
    ended = f"last_over_time({_now(metric)}[{REGRESSION_DAYS}d]) unless on (run) {_now(metric)}"
    usual = f"quantile by (experiment) (0.5, {ended})"
    return {
        _now(metric): now,
        metric.name: f"max by (run) (0 * {_now(metric)} + on (experiment) group_left () {usual})",
    }


RECORDS: Mapping[str, str] = {
    **_records(EARLIER_STEP_SECONDS, WINDOW_STEP_SECONDS.where(quantile="0.5")),
    **_records(EARLIER_PEAK, DEVICE_ACTIVE_PEAK),
    **_records(EARLIER_WAIT, WAIT_SHARE),
}
"""Recording rules: name and expression, in the order in which they are to be computed."""


def _run(step: float, peak: float, wait: float) -> dict[str, tuple[float, ...]]:
    """A rank of a run with this median step, peak and share of waiting, that has gone on for half an hour."""
    phases = {"data": 60 * wait, "forward": 60 * (1 - wait)}
    return {
        series_key(WINDOW_STEP_SECONDS.name, {"quantile": "0.5"}): flat(step, _MINUTES),
        series_key(WINDOW_STEP_SECONDS.name, {"quantile": "0.99"}): flat(2 * step, _MINUTES),
        DEVICE_ACTIVE_PEAK.name: flat(peak, _MINUTES),
        **{
            series_key(PHASE_SECONDS.name, {"phase": name}): ramp(seconds, _MINUTES) for name, seconds in phases.items()
        },
    }


_EARLIER = {
    EARLIER_STEP_SECONDS.name: flat(0.2, _MINUTES),
    EARLIER_PEAK.name: flat(40e9, _MINUTES),
    EARLIER_WAIT.name: flat(0.02, _MINUTES),
}

RULES = (
    Rule(
        id="perf-regression",
        title="The run is slower or larger than earlier runs of its experiment",
        severity="warn",
        scope="run",
        when=(_RATIO >= REGRESSION_STEP_RATIO)
        | (_PEAK / EARLIER_PEAK >= REGRESSION_MEMORY_RATIO)
        | (_WAIT - EARLIER_WAIT >= REGRESSION_WAIT_POINTS),
        hold_minutes=10,
        value=Quantity("step_of_earlier", _RATIO, "ratio"),
        quantities=(
            Quantity("step", _STEP, "seconds"),
            Quantity("earlier_step", EARLIER_STEP_SECONDS, "seconds"),
            Quantity("peak", _PEAK, "bytes"),
            Quantity("earlier_peak", EARLIER_PEAK, "bytes"),
            Quantity("wait", _WAIT, "ratio"),
            Quantity("earlier_wait", EARLIER_WAIT, "ratio"),
        ),
        because=(
            "Compared with the median of the experiment's runs that ended in the last week: the median step of the "
            f"slowest rank takes {100 * (REGRESSION_STEP_RATIO - 1):.0f} % longer, the fullest rank's peak is "
            f"{100 * (REGRESSION_MEMORY_RATIO - 1):.0f} % larger, or the share of time that waits for data is "
            f"{100 * REGRESSION_WAIT_POINTS:.0f} points higher. An experiment is the script's name, or "
            "GPUWATCH_EXPERIMENT."
        ),
        evidence="a step takes {step}, it took {earlier_step}; the peak of memory is {peak}, it was {earlier_peak}; "
        "{wait} of the time waits for data, it was {earlier_wait}",
        fix="See what changed: `gpuwatch compare EARLIER THIS` names the phase, the settings that differ and the "
        "findings that are new; then the code, the batch, the data, the versions, the node and its neighbours.",
        gain=Gain("the time of the earlier runs", removable=one_minus(EARLIER_STEP_SECONDS / _STEP)),
        check="Step time, peak and waiting come back to those of the earlier runs.",
        examples=(
            Example("slower", {**of_ranks(_run(0.23, 40e9, 0.02), _run(0.2, 40e9, 0.02)), **_EARLIER}, True),
            Example("larger", {**of_ranks(_run(0.2, 48e9, 0.02), _run(0.2, 40e9, 0.02)), **_EARLIER}, True),
            Example("waiting more", {**of_ranks(_run(0.2, 40e9, 0.09), _run(0.2, 40e9, 0.01)), **_EARLIER}, True),
            Example("as ever", {**of_ranks(_run(0.21, 42e9, 0.04)), **_EARLIER}, False),
            Example("the first of its experiment", of_ranks(_run(0.9, 70e9, 0.5)), False),
        ),
    ),
)
