"""What an experiment's earlier runs were like: computed by Prometheus from what their ranks published."""

from __future__ import annotations

from gpuwatch.expr import Metric

EARLIER_STEP_SECONDS = Metric(
    "gpuwatch_earlier_step_seconds",
    "gauge",
    "seconds",
    "Median step of the same experiment's earlier runs, of each its slowest rank; their median.",
    "run",
)
EARLIER_PEAK = Metric(
    "gpuwatch_earlier_peak_bytes",
    "gauge",
    "bytes",
    "Peak of live device memory of the same experiment's earlier runs, of each its fullest rank; their median.",
    "run",
)
EARLIER_WAIT = Metric(
    "gpuwatch_earlier_wait_ratio",
    "gauge",
    "ratio",
    "Share of step time that the same experiment's earlier runs waited for data, of each its worst rank; their median.",
    "run",
)
EARLIER = (EARLIER_STEP_SECONDS, EARLIER_PEAK, EARLIER_WAIT)
"""Published by no daemon."""
