"""Training computes the same to the last bit with every detector at work on every step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuwatch
from gpuwatch_hooks import attach as attaching
from gpuwatch_hooks import device, handles, leaks, ownership, session, trend
from gpuwatch_hooks.leaks import LeakProbe
from gpuwatch_hooks.modules import ModuleProbe
from gpuwatch_hooks.retention import RetentionProbe
from tests.outcomes import outcome
from tests.scripted_device import ScriptedAccelerator
from tests.trainings import TRAININGS

KINDS = (
    "perceptron with 0 workers",
    "convolution with 0 workers",
    "recurrent with 0 workers",
    "accumulated gradients",
    "two networks watched by two attaches",
    "autocast and scaler",
    "checkpoint",
    "updates by hand",
)


def always(value: object) -> property:
    """An attribute that cannot be changed."""
    return property(lambda self: value, lambda self, new: None)


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Every step is looked at, searched, measured and ticked; the counts of what was done."""
    counts = {"searches": 0, "measurements": 0}
    monkeypatch.setattr(session, "TICK_NANOSECONDS", 1)
    monkeypatch.setattr(session, "DENSE_STEPS", 1 << 40)
    for name, value in (("ASKED_EVERY", 1), ("EVERY_AT_FIRST", 1), ("FIRST_STEP", 0), ("LIBRARIES_EVERY", 1)):
        monkeypatch.setattr(leaks, name, value)
    monkeypatch.setattr(leaks, "ALLOWANCE_NANOSECONDS", 1 << 60)
    monkeypatch.setattr(LeakProbe, "next_step", always(0), raising=False)
    monkeypatch.setattr(RetentionProbe, "asking", always(True), raising=False)
    monkeypatch.setattr(ModuleProbe, "next_step", always(0), raising=False)
    monkeypatch.setattr(trend, "EVERY_STEPS", 1)
    monkeypatch.setattr(trend, "SETTLE_STEPS", 0)
    for module in (handles, ownership):
        monkeypatch.setattr(module, "EVERY_STEPS", 1)
        monkeypatch.setattr(module, "SELDOM_STEPS", 1)
    monkeypatch.setattr(device, "COUNTERS_NANOSECONDS", 0)
    monkeypatch.setattr(device, "CudaAccelerator", ScriptedAccelerator)
    compare, begin = LeakProbe._compare, ModuleProbe.forward_begin

    def compared(probe: LeakProbe, *arguments: Any) -> None:
        counts["searches"] += 1
        compare(probe, *arguments)

    def begun(probe: ModuleProbe, *arguments: Any) -> None:
        counts["measurements"] += 1
        begin(probe, *arguments)

    monkeypatch.setattr(LeakProbe, "_compare", compared)
    monkeypatch.setattr(ModuleProbe, "forward_begin", begun)
    yield counts


@pytest.mark.parametrize("name", KINDS)
def test_training_is_the_same_with_every_detector_at_every_step(
    name: str, records: Path, forced: dict[str, int]
) -> None:
    watches = []

    def attach(*arguments: Any) -> None:
        watches.append(gpuwatch.attach(*arguments))
        assert attaching._active is not None
        attaching._active.session.device.active = True

    expected = outcome(TRAININGS[name], lambda *arguments: None)
    actual = outcome(TRAININGS[name], attach)
    for watch in watches:
        watch.detach()
    assert actual == expected
    # Where the loop has no optimizer, steps begin once gpuwatch has seen that there is none.
    least = 60 if name == "updates by hand" else 100
    assert forced["searches"] >= least and forced["measurements"] >= 2, forced
