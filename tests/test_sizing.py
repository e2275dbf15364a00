"""The model of the loader: what it recommends, and what it never does."""

from __future__ import annotations

import itertools

import pytest

from gpuwatch.delivery import Costs, Setting, step_seconds
from gpuwatch.sizing import (
    GOOD_ENOUGH,
    WORKERS_PER_CORE,
    Advice,
    Room,
    recommend,
    settings,
    worker_counts,
)

ALONE = Setting(0, 2)
SKEWED = (0.002,) * 9 + (0.080,)


def costs(making: float | tuple[float, ...], cpu: float = 0.0, step: float = 0.010, step_cpu: float = 0.0) -> Costs:
    """A step of 10 ms on a device, fed by batches that cost this much; handing over costs next to nothing."""
    times = tuple(sorted(making)) if isinstance(making, tuple) else (making,)
    return Costs(step, step_cpu, times, cpu, sending=50e-6, receiving=100e-6)


def advised(
    cost: Costs, cores: float = 2, present: Setting = ALONE, workers: int = 1000, batches: int = 1000
) -> Advice:
    """The advice on a node with this room."""
    return recommend(cost, Room(cores, workers, batches), present)


def test_batches_that_wait_for_storage_get_as_many_workers_as_hide_it() -> None:
    advice = advised(costs(0.035))
    assert advice.setting.workers == 4
    assert advice.wait_ratio < 0.03


def test_batches_that_cost_cpu_time_get_no_more_workers_than_cores() -> None:
    advice = advised(costs(0.040, cpu=0.040))
    assert advice.setting.workers == 2
    assert advice.wait_ratio == pytest.approx(1 - 0.010 / 0.0201, abs=0.02)


def test_what_no_worker_count_can_reach_is_said_with_cores_and_with_costs() -> None:
    advice = advised(costs(0.040, cpu=0.040))
    assert advice.needed_cores == pytest.approx(4.0, abs=0.1)
    assert advice.affordable is not None and advice.affordable == pytest.approx(0.020, rel=0.05)
    assert advised(costs(advice.affordable, cpu=advice.affordable)).wait_ratio < 0.04, "with this it is reached"
    assert advised(costs(0.040, cpu=0.040), cores=advice.needed_cores).wait_ratio < 0.04, "and with these"


def test_nothing_has_to_shrink_where_workers_hide_it() -> None:
    assert advised(costs(0.035)).affordable is None
    assert advised(costs(0.035), workers=2).affordable == pytest.approx(0.0206, rel=0.01)


def test_training_that_needs_the_cores_itself_leaves_none_for_workers() -> None:
    training = costs(0.010, cpu=0.010, step=0.010, step_cpu=0.020)
    assert advised(training).affordable == pytest.approx(0.0, abs=0.001)
    assert advised(training).setting.workers <= 1


def test_tiny_items_are_loaded_on_the_training_thread() -> None:
    tiny = Costs(0.005, 0.0, (80e-6,), 80e-6, sending=500e-6, receiving=1e-3)
    assert advised(tiny).setting.workers == 0
    assert advised(tiny, present=Setting(2, 2)).setting.workers == 0


def test_skewed_items_get_a_longer_prefetch_rather_than_many_workers() -> None:
    even, skewed = advised(costs(0.0085)), advised(costs(SKEWED))
    assert even.setting == Setting(1, 2)
    assert skewed.setting.prefetch > 2
    assert step_seconds(costs(SKEWED), 2, skewed.setting) < 0.9 * step_seconds(
        costs(SKEWED), 2, Setting(skewed.setting.workers, 2)
    )


@pytest.mark.parametrize("cpu", [0.0, 0.010, 0.050])
def test_more_cores_never_make_it_slower(cpu: float) -> None:
    cost = costs(0.050, cpu=cpu, step_cpu=0.005)
    reached = [step_seconds(cost, cores, advised(cost, cores).setting) for cores in (1, 2, 3, 4, 8, 16, 64)]
    assert all(later <= GOOD_ENOUGH * earlier for earlier, later in itertools.pairwise(reached))
    assert reached[-1] < 0.011


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_no_more_workers_than_memory_holds(workers: int) -> None:
    assert advised(costs(0.080), workers=workers).setting.workers <= workers


@pytest.mark.parametrize("batches", [0, 1, 3, 8, 31])
@pytest.mark.parametrize("making", [0.080, SKEWED])
def test_no_more_batches_under_way_than_shared_memory_holds(batches: int, making: float | tuple[float, ...]) -> None:
    setting = advised(costs(making), batches=batches).setting
    assert setting.workers * setting.prefetch <= batches


def test_a_setting_that_is_as_good_as_the_best_is_kept() -> None:
    for present in (Setting(4, 2), Setting(6, 4), Setting(8, 2)):
        assert advised(costs(0.035), present=present).setting == present
    assert advised(costs(0.035), present=Setting(3, 2)).setting.workers == 4


def test_workers_that_wait_for_each_others_cores_are_too_many_even_where_fewer_are_no_faster() -> None:
    cost, room = costs(0.040, cpu=0.040), Room(2, 1000, 1000)
    assert recommend(cost, room, Setting(16, 2)).setting.workers == 16
    assert recommend(cost, room, Setting(16, 2), crowded=True).setting.workers == 2


@pytest.mark.parametrize("present", [ALONE, Setting(1, 2), Setting(2, 2), Setting(1, 8)])
@pytest.mark.parametrize("making", [0.035, 0.0098, SKEWED])
def test_the_advice_does_not_depend_on_where_the_run_stands(
    present: Setting, making: float | tuple[float, ...]
) -> None:
    cost = costs(making)
    best = min(step_seconds(cost, 2, setting) for setting in settings(Room(2, 100, 1000), ALONE))
    assert step_seconds(cost, 2, advised(cost, present=present).setting) < 1.05 * best


def test_one_core_for_training_and_workers_gains_nothing_from_workers() -> None:
    advice = advised(costs(0.010, cpu=0.010, step_cpu=0.010), cores=1)
    assert advice.setting.workers == 0
    assert advice.wait_ratio == pytest.approx(0.5, abs=0.01)


def test_worker_counts_reach_the_most_in_growing_strides() -> None:
    assert list(worker_counts(0)) == []
    assert list(worker_counts(8)) == list(range(1, 9))
    counts = list(worker_counts(512))
    assert counts[-1] == 512 and len(counts) < 60


def test_no_more_workers_are_tried_than_a_core_can_serve() -> None:
    assert advised(costs(10.0), cores=2).setting.workers <= 2 * WORKERS_PER_CORE


def test_a_step_without_any_time_of_its_own_is_no_error() -> None:
    nothing = Costs(0.0, 0.0, (0.0,), 0.0, sending=0.0, receiving=0.0)
    assert advised(nothing).wait_ratio == 0.0
