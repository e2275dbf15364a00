"""What is kept of a GPU's past: numbers, as many as are needed, and nothing that was not known."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from gpuwatch.nvml import GpuReading
from gpuwatch.past import DROPPED_SAMPLES, FEWEST_SAMPLES, KEPT_SAMPLES, Past

READING = GpuReading(
    0, "GPU-1", "H100", "0:7", utilization_ratio=0.5, power_watts=600.0, clock_reasons=4, processes=((7, 1 << 30),)
)


def test_a_reading_that_was_not_known_is_absent_at_that_time() -> None:
    past = Past()
    for second in range(FEWEST_SAMPLES):
        assert past.history() == {}
        past.add(float(second), replace(READING, power_watts=None if second % 2 else 100.0 + second))
    history = past.history()
    assert history["gpuwatch_gpu_power_watts"] == [(float(second), 100.0 + second) for second in range(0, 10, 2)]
    assert [taken for taken, _ in history["gpuwatch_gpu_utilization_ratio"]] == [*map(float, range(10))]
    past.add(10.0, replace(READING, temperature_celsius=70.0))
    assert past.history()["gpuwatch_gpu_temperature_celsius"] == [(10.0, 70.0)]


def test_five_minutes_are_kept_and_take_no_more_room_with_time() -> None:
    past = Past()
    last = 5 * KEPT_SAMPLES
    tracemalloc.start()
    for second in range(last):
        past.add(float(second), replace(READING, power_watts=float(second)))
        if second == 2 * KEPT_SAMPLES:
            before = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000
    samples = past.history()["gpuwatch_gpu_power_watts"]
    assert samples[-1] == (float(last - 1), float(last - 1))
    assert KEPT_SAMPLES <= len(samples) < KEPT_SAMPLES + DROPPED_SAMPLES
    assert samples[0][0] == last - len(samples)


def test_a_number_that_changes_late_has_its_whole_past() -> None:
    past = Past()
    for second in range(KEPT_SAMPLES + DROPPED_SAMPLES + 5):
        past.add(float(second), replace(READING, power_watts=600.0 if second < 300 else 500.0, pcie_width=16))
    history = Past.of(past.told()).history()
    assert history == past.history()
    known = history["gpuwatch_gpu_power_watts"]
    assert known[0] == (float(DROPPED_SAMPLES), 600.0) and known[-1][1] == 500.0
    assert [number for at, number in known if at == 299] == [600.0] and len(known) == KEPT_SAMPLES + 5
    assert {number for _, number in history["gpuwatch_gpu_pcie_width_lanes"]} == {16.0}
