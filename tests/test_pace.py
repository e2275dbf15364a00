"""How far apart looks are: by what one takes beside a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwatch.layout import State
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.pace import HURRIED_EVERY, LOOK_EVERY, RAREST_EVERY, SETTLED_STEPS, Pace

MILLISECOND = 1_000_000
JITTER = 4
"""Looks are not exactly so far apart, lest they beat with the run."""


@pytest.mark.parametrize(
    ("milliseconds", "steps", "every"),
    [
        pytest.param(5, SETTLED_STEPS - 1, LOOK_EVERY, id="early in a run"),
        pytest.param(2, SETTLED_STEPS, 4 * LOOK_EVERY, id="later"),
        pytest.param(2_000, SETTLED_STEPS, HURRIED_EVERY, id="long steps, beside which a look is nothing"),
        pytest.param(0.2, SETTLED_STEPS - 1, LOOK_EVERY, id="short steps, early in a run"),
        pytest.param(0.2, SETTLED_STEPS, RAREST_EVERY, id="short steps, beside which a look is much"),
    ],
)
def test_looks_are_as_far_apart_as_their_cost_allows(
    tmp_path: Path, milliseconds: float, steps: int, every: int
) -> None:
    record = RecordWriter(tmp_path, {"run": "pace", "rank": 0})
    pace = Pace(record)
    step_nanoseconds = int(milliseconds * MILLISECOND)
    pace.rest_until(steps - 100, 1)
    pace.rest_until(steps, 1 + 100 * step_nanoseconds)
    assert pace.next_look - steps == pytest.approx(every, abs=JITTER)
    pace.rest_until(steps + 100, 1 + 200 * step_nanoseconds, hurried=True)
    assert pace.next_look - steps - 100 == pytest.approx(HURRIED_EVERY, abs=JITTER)
    record.close(State.CLEAN)
