"""How long a step takes: the model against the same machine played through event by event."""

from __future__ import annotations

import random
import statistics

import pytest

from gpuwatch.delivery import Setting, delivery_seconds, quickest, slowdown, step_seconds
from gpuwatch.sizing import Room, recommend
from tests.coresharing import Imagined, played_step

KINDS = ("CPU-bound", "I/O-bound", "mixed", "skewed", "training on the CPU", "tiny")
SENDING, RECEIVING = 0.5e-3, 0.7e-3


def imagined(kind: str, seed: int) -> tuple[Imagined, float]:
    """A load of this kind, and the cores it has, by chance."""
    draw = random.Random(f"{kind} {seed}")
    step = draw.uniform(4, 30) / 1000
    making = step * draw.choice((0.3, 0.6, 0.9, 1.3, 2, 3, 4))
    busy = {"CPU-bound": 1.0, "mixed": draw.uniform(0.1, 0.6), "training on the CPU": draw.uniform(0.3, 1)}.get(
        kind, 0.03
    )
    if kind == "tiny":
        making, busy = 0.1e-3, 1.0
    batches = [making * draw.uniform(0.8, 1.2) for _ in range(100)]
    if kind == "skewed":
        often, factor = draw.choice((2, 5, 10, 20)), draw.choice((5, 10, 20))
        usual = making / (1 + often / 100 * (factor - 1))
        batches = [usual * (factor if place < often else 1) for place in range(100)]
    on_core = step if kind == "training on the CPU" else 0.05 * step
    pairs = tuple((seconds * (1 - busy), seconds * busy) for seconds in batches)
    return Imagined((step - on_core, on_core), pairs, SENDING, RECEIVING), draw.choice((2.0, 2.0, 4.0))


def usual_step(load: Imagined, cores: float, setting: Setting) -> float:
    """Mean step over several orders of the batches: where few are slow, their order matters."""
    return statistics.fmean(played_step(load, cores, setting, seed) for seed in range(3))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recommended_is_close_to_the_best_of_the_sweep(kind: str, seed: int) -> None:
    load, cores = imagined(kind, seed)
    present = Setting((0, 1, 2)[seed % 3], 2)
    advice = recommend(load.costs(), Room(cores, 1000, 1000), present)
    applied = usual_step(load, cores, advice.setting)
    best = min(usual_step(load, cores, Setting(workers, 2)) for workers in (0, 1, 2, 3, 4, 6, 8))
    assert applied < 1.15 * best
    assert advice.wait_ratio == pytest.approx(1 - sum(load.step) / applied, abs=0.15), "the stall that remains"


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_as_long_as_the_model_says(kind: str) -> None:
    load, cores = imagined(kind, 7)
    for workers in (0, 1, 2, 4, 8):
        setting = Setting(workers, 2)
        assert step_seconds(load.costs(), cores, setting) == pytest.approx(played_step(load, cores, setting), rel=0.2)


def test_nothing_slows_down_what_runs_alone_or_has_a_core_to_itself() -> None:
    assert slowdown(0, 1.0, 0.0, cores=1) == 1
    assert slowdown(1, 1.0, 0.0, cores=2) == 1
    assert slowdown(100, 0.0, 0.0, cores=2) == 1


def test_what_is_always_ready_beside_others_gets_its_share_of_the_cores() -> None:
    assert slowdown(3, 1.0, 0.0, cores=2) == pytest.approx(2.0)
    assert slowdown(3, 1.0, 1.0, cores=2) == pytest.approx(2.5)
    assert slowdown(1, 0.5, 0.0, cores=1) == pytest.approx(1.5)
    assert slowdown(99, 1.0, 0.0, cores=10) == pytest.approx(10.0)


def test_workers_and_cores_that_are_both_just_enough_are_not() -> None:
    busy = Imagined((0.010, 0.0), ((0.010, 0.010),) * 10, 0.0, 0.0)
    costs, setting = busy.costs(), Setting(2, 2)
    assert quickest(costs, 1, setting) == pytest.approx(0.010) == delivery_seconds(costs, setting)
    assert step_seconds(costs, 1, setting) > 0.0105


@pytest.mark.parametrize("prefetch", [1, 2, 8])
@pytest.mark.parametrize("workers", [1, 3, 17])
def test_batches_that_are_all_alike_come_at_the_workers_rate(workers: int, prefetch: int) -> None:
    slow = Imagined((0.001, 0.0), ((0.100, 0.0),) * 10, 0.0, 0.0).costs()
    if prefetch == 1:  # a worker is given its next batch only when training has taken the last one
        assert delivery_seconds(slow, Setting(workers, 1)) >= 0.100 / workers
    else:
        assert delivery_seconds(slow, Setting(workers, prefetch)) == pytest.approx(0.100 / workers, rel=0.1)
