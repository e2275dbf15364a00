"""From a run's gauges to the loader setting to recommend: what is taken out, and when nothing is said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuwatch.catalog import (
    BATCHES,
    CPU_BUDGET,
    CPU_WAIT_SECONDS,
    DEVICE_PHASE_SECONDS,
    HOST_AVAILABLE,
    HOST_RESIDENT,
    LOADER_AFFORDABLE,
    LOADER_ALONE,
    LOADER_BATCH_BYTES,
    LOADER_BATCH_CPU_SECONDS,
    LOADER_BATCH_SECONDS,
    LOADER_BEST_PREFETCH,
    LOADER_BEST_WAIT,
    LOADER_BEST_WORKERS,
    LOADER_CROWDED,
    LOADER_EXPECTED_WAIT,
    LOADER_NEEDED_CORES,
    LOADER_PART_SECONDS,
    LOADER_PREFETCH,
    LOADER_READY,
    LOADER_RECEIVE_CPU_SECONDS,
    LOADER_SHARE,
    LOADER_WORKERS,
    LOCAL_RANKS,
    PHASE_SECONDS,
    SHARED_MEMORY_TOTAL,
    SHARED_MEMORY_USED,
    TRAINING_CORES,
    WORKER_BLOCKED,
    WORKER_CPU,
    WORKER_CPU_WAIT,
    WORKER_UNIQUE,
)
from gpuwatch.delivery import Costs
from gpuwatch.expr import series_key
from gpuwatch.history import history_of
from gpuwatch.loadercosts import RECEIVING_SECONDS, batch_costs, gauges, mean_step, present_setting
from gpuwatch.loaderroom import room_left
from gpuwatch.rankseries import rank_series
from gpuwatch.reader import read
from gpuwatch.sizing import Room
from gpuwatch.window import Steps
from tests.recorded import write_run

STEPS = 500
RUN_SECONDS = 100.0
MEDIAN = series_key(LOADER_BATCH_SECONDS.name, {"quantile": "0.5"})
TRANSFER = series_key(LOADER_PART_SECONDS.name, {"part": "transfer"})
MADE = {series_key(LOADER_BATCH_SECONDS.name, {"quantile": share}): 0.040 for share in ("0.1", "0.5", "0.9", "0.99")}
ROOM = {
    BATCHES.name: float(STEPS),
    TRAINING_CORES.name: 0.25,
    CPU_BUDGET.name: 8.0,
    HOST_AVAILABLE.name: 64e9,
    HOST_RESIDENT.name: 1e9,
    LOADER_BATCH_BYTES.name: 1e6,
    SHARED_MEMORY_TOTAL.name: 32e9,
    SHARED_MEMORY_USED.name: 0.0,
}
ALONE = {**ROOM, **MADE, LOADER_WORKERS.name: 0.0, LOADER_BATCH_CPU_SECONDS.name: 0.004}
"""Batches that take 40 ms, 4 of them on a core, made by the training thread."""

HELPED = {
    **ALONE,
    LOADER_WORKERS.name: 2.0,
    LOADER_PREFETCH.name: 2.0,
    WORKER_CPU.name: 0.1,
    WORKER_BLOCKED.name: 0.9,
    WORKER_CPU_WAIT.name: 0.0,
    WORKER_UNIQUE.name: 100e6,
}
"""The same, made by two workers."""


def steps(total: float = 0.050, wait: float = 0.040) -> Steps:
    """A hundred steps of 50 ms, 40 of them waiting."""
    return Steps([total] * 100, [wait] * 100, [0.0] * 100, [64.0] * 100)


def advised(values: Mapping[str, float], recent: Steps | None = None) -> dict[str, float]:
    """The gauges of the recommended setting, by name."""
    found = gauges(values, recent or steps(), STEPS, RUN_SECONDS)
    return {metric.name: number for metric, _, number in found}


def costs(values: Mapping[str, float], recent: Steps | None = None) -> Costs:
    """The costs of a batch."""
    step = mean_step(recent or steps(), 1.0)
    present = present_setting(values)
    assert step is not None and present is not None
    found = batch_costs(values, step, RUN_SECONDS, present)
    assert found is not None
    return found


def room(values: Mapping[str, float]) -> Room | None:
    """What is left for workers."""
    present = present_setting(values)
    assert present is not None
    return room_left(values, present)


def mean(found: Costs) -> float:
    """Mean time to make a batch."""
    return sum(found.making) / len(found.making)


@pytest.mark.parametrize("values", [ALONE, HELPED])
def test_slow_batches_get_the_workers_that_hide_them(values: dict[str, float]) -> None:
    advice = advised(values, steps(0.050, 0.040) if values is ALONE else steps(0.020, 0.010))
    assert advice[LOADER_BEST_WORKERS.name] in (4, 5)
    assert advice[LOADER_BEST_PREFETCH.name] == 2
    assert advice[LOADER_BEST_WAIT.name] < 0.12
    assert LOADER_AFFORDABLE.name not in advice, "nothing has to shrink"
    assert 0 < advice[LOADER_NEEDED_CORES.name] < 2
    assert advice[LOADER_ALONE.name] == pytest.approx(0.040)


@pytest.mark.parametrize("missing", sorted({*ALONE} - {HOST_RESIDENT.name} - {*MADE} | {MEDIAN}))
@pytest.mark.parametrize("values", [ALONE, HELPED])
def test_without_an_input_nothing_is_said(values: dict[str, float], missing: str) -> None:
    assert advised(values) and not advised({key: number for key, number in values.items() if key != missing})


@pytest.mark.parametrize(("values", "missing"), [(ALONE, HOST_RESIDENT.name), (HELPED, WORKER_UNIQUE.name)])
def test_a_worker_of_unknown_size_is_not_recommended(values: dict[str, float], missing: str) -> None:
    assert not advised({key: number for key, number in values.items() if key != missing})


def test_too_few_steps_say_nothing() -> None:
    assert not advised(ALONE, Steps([0.05] * 39, [0.04] * 39, [0.0] * 39, [64.0] * 39))
    assert not advised(ALONE, Steps([0.05] * 99, [math.nan] * 99, [0.0] * 99, [64.0] * 99))


def test_a_run_that_hardly_waits_keeps_what_it_has() -> None:
    advice = advised(HELPED, steps(0.040, 0.0004))
    assert (advice[LOADER_BEST_WORKERS.name], advice[LOADER_BEST_PREFETCH.name]) == (2, 2)
    assert advice[LOADER_BEST_WAIT.name] == pytest.approx(0.01)


def test_what_workers_wait_for_a_core_is_taken_out() -> None:
    crowded = {
        **HELPED,
        **dict.fromkeys(MADE, 0.080),
        WORKER_CPU.name: 0.05,
        WORKER_BLOCKED.name: 0.45,
        WORKER_CPU_WAIT.name: 0.5,
    }
    assert mean(costs(crowded)) == pytest.approx(mean(costs(HELPED)), rel=0.01)


def test_what_the_training_thread_waits_for_a_core_is_taken_out_where_it_runs() -> None:
    # A quarter of a core is kept busy, and as long again it waits for one: batches cost 4 ms of it, training 8.5.
    waiting = {**ALONE, CPU_WAIT_SECONDS.name: 25.0}
    assert mean(costs(waiting)) == pytest.approx(0.040 - 0.004, rel=0.01)
    assert costs(waiting).training == pytest.approx(0.010 / 2), "no more than half is believed to be waiting"
    assert costs(ALONE).training == pytest.approx(0.010)


def test_the_training_process_is_not_charged_for_batches_it_makes_itself() -> None:
    assert costs(ALONE).training_cpu == pytest.approx(0.25 * 0.050 - 0.004)
    assert costs(HELPED).training_cpu == pytest.approx(0.25 * 0.050 - RECEIVING_SECONDS)


def test_the_mean_of_batches_made_in_workers_is_told_by_their_cpu_time() -> None:
    skewed = {**HELPED, series_key(LOADER_BATCH_SECONDS.name, {"quantile": "0.99"}): 0.400}
    assert mean(costs({**skewed, WORKER_CPU.name: 0.08, WORKER_BLOCKED.name: 0.92})) == pytest.approx(0.050, rel=0.03)


def test_the_cost_of_a_batch_that_is_ready_is_believed_where_they_mostly_are() -> None:
    assert costs({**HELPED, TRANSFER: 0.004, LOADER_READY.name: 0.9}).receiving == 0.004
    assert costs({**HELPED, TRANSFER: 0.004, LOADER_READY.name: 0.1}).receiving == RECEIVING_SECONDS
    assert costs({**HELPED, TRANSFER: 0.0002, LOADER_READY.name: 0.1}).receiving == 0.0002


def test_costs_are_those_of_a_batch_where_a_step_takes_several() -> None:
    step = mean_step(steps(0.200, 0.160), 4.0)
    present = present_setting(ALONE)
    assert step is not None and present is not None
    found = batch_costs(ALONE, step, RUN_SECONDS, present)
    assert found is not None and found.training == pytest.approx(0.010)


def test_of_a_step_that_takes_a_batch_of_each_of_two_loaders_one_is_this_ones() -> None:
    both = {**HELPED, BATCHES.name: 2.0 * STEPS, LOADER_SHARE.name: 0.5}
    assert advised(both, steps(0.020, 0.010)) == advised(HELPED, steps(0.020, 0.010))


SAMPLER = series_key(LOADER_PART_SECONDS.name, {"part": "sampler"})
SOON = dict.fromkeys(MADE, 0.004)
"""Batches that are made in 4 ms."""

CROWD = {CPU_WAIT_SECONDS.name: 30.0, series_key(PHASE_SECONDS.name, {"phase": "data"}): 50.0}
LATE = {**ALONE, **dict.fromkeys(MADE, 0.010), **CROWD, CPU_WAIT_SECONDS.name: 50.0}
"""Batches that the training thread makes in 10 ms, 6 of them without a core."""


@pytest.mark.parametrize(
    ("values", "wait", "crowded"),
    [
        ({**HELPED, **CROWD, LOADER_READY.name: 1.0}, 0.010, True),
        ({**HELPED, **CROWD, LOADER_READY.name: 0.8}, 0.010, False),
        ({**HELPED, **CROWD, LOADER_READY.name: 1.0}, 0.004, False),
        ({**HELPED, **CROWD, LOADER_READY.name: 1.0, CPU_WAIT_SECONDS.name: 20.0}, 0.010, False),
        ({**HELPED, **CROWD, LOADER_READY.name: 1.0, LOADER_RECEIVE_CPU_SECONDS.name: 0.006}, 0.010, False),
        ({**HELPED, **SOON, LOADER_BATCH_CPU_SECONDS.name: 0.0004, WORKER_CPU_WAIT.name: 0.4}, 0.010, True),
        ({**HELPED, **SOON, LOADER_BATCH_CPU_SECONDS.name: 0.0004, WORKER_CPU_WAIT.name: 0.1}, 0.010, False),
        ({**HELPED, WORKER_CPU_WAIT.name: 0.4}, 0.010, False),
        (ALONE, 0.010, False),
        (LATE, 0.010, True),
        ({**LATE, SAMPLER: 0.004}, 0.010, False),
    ],
    ids=[
        "ready, and long in coming", "often ready", "ready, and soon there", "ready, long in coming, with a core",
        "ready, and long to unpickle",
        "made soon, without cores", "made soon, with cores", "made slowly, without cores",
        "made by the training thread", "made by it, without a core", "made by it, without a core, and a sampler",
    ],
)  # fmt: skip
def test_batches_that_are_late_for_want_of_cores_alone(values: dict[str, float], wait: float, crowded: bool) -> None:
    assert advised(values, steps(0.020, wait))[LOADER_CROWDED.name] == crowded


def test_a_device_that_is_busy_meanwhile_loses_nothing_by_the_wait() -> None:
    busy = {
        series_key(DEVICE_PHASE_SECONDS.name, {"phase": phase}): seconds
        for phase, seconds in {"data": 1.0, "forward": 30.0, "backward": 69.0}.items()
    }
    assert costs({**ALONE, **busy}).training == pytest.approx(0.0495)


def test_workers_fit_in_memory() -> None:
    assert room({**HELPED, HOST_AVAILABLE.name: 350e6}) == Room(8.0, 2 + 2, 105)
    assert room({**ALONE, HOST_AVAILABLE.name: 2e9}) == Room(8.0, 1, 600), "each may grow to what training has"
    advice = advised({**ALONE, HOST_AVAILABLE.name: 2e9})
    assert advice[LOADER_BEST_WORKERS.name] == 1 and advice[LOADER_AFFORDABLE.name] == pytest.approx(0.011, rel=0.1)
    assert advised({**ALONE, HOST_AVAILABLE.name: 0.5e9})[LOADER_BEST_WORKERS.name] == 0


def test_batches_under_way_fit_in_shared_memory() -> None:
    tight = {**ALONE, SHARED_MEMORY_TOTAL.name: 64e6, SHARED_MEMORY_USED.name: 54e6}
    assert room(tight) == Room(8.0, 38, 5)
    advice = advised(tight)
    assert advice[LOADER_BEST_WORKERS.name] * advice[LOADER_BEST_PREFETCH.name] <= 5
    assert room({**HELPED, SHARED_MEMORY_TOTAL.name: 64e6, SHARED_MEMORY_USED.name: 64e6}) == Room(8.0, 386, 4), (
        "what is under way now has its place"
    )


def test_the_ranks_of_a_node_share_what_is_left() -> None:
    shared = {**HELPED, HOST_AVAILABLE.name: 2e9, SHARED_MEMORY_TOTAL.name: 64e6}
    assert room(shared) == Room(8.0, 2 + 12, 32)
    assert room({**shared, LOCAL_RANKS.name: 4.0}) == Room(8.0, 2 + 3, 8)


@pytest.mark.parametrize("absurd", [-1.0, 0.0, 1e17, math.inf, math.nan])
@pytest.mark.parametrize(
    "name", sorted({*HELPED, LOCAL_RANKS.name, CPU_WAIT_SECONDS.name, TRANSFER, LOADER_READY.name})
)
def test_an_absurd_number_raises_nothing(name: str, absurd: float) -> None:
    for values in (ALONE, HELPED):
        assert all(math.isfinite(number) for number in advised({**values, name: absurd}).values())


def test_the_advice_is_in_the_history_and_published_and_a_record_cannot_forge_it(tmp_path: Path) -> None:
    forged = {LOADER_BEST_WORKERS.name: 99.0}
    snapshot = read(write_run(tmp_path, values={**ALONE, BATCHES.name: 200.0, **forged}).path)
    history = history_of(snapshot)
    best = LOADER_BEST_WORKERS.value(history)
    assert best is not None and 1 <= best <= 8
    published = [number for metric, _, number in rank_series(snapshot).series if metric == LOADER_BEST_WORKERS]
    assert published == [best]


def test_the_wait_by_what_batches_cost_is_told_however_it_comes() -> None:
    """Two workers give a batch each 40 ms; training takes 10 ms. Waits for a core are in what was measured alone."""
    expected = advised(HELPED, steps(0.020, 0.010))[LOADER_EXPECTED_WAIT.name]
    assert 0.010 <= expected < 0.012
    crowded = {**HELPED, WORKER_CPU.name: 0.1, WORKER_BLOCKED.name: 0.0, WORKER_CPU_WAIT.name: 0.9}
    assert advised(crowded, steps(0.020, 0.010))[LOADER_EXPECTED_WAIT.name] < 0.001
    assert LOADER_EXPECTED_WAIT.name not in advised(HELPED, steps(0.020, 0.0001)), "nothing to work out"
