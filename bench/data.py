"""``python -m bench.data``: are the recommended loader settings the best ones?

Each load is trained with a poor setting, watched, and the recommended setting read from the record. Then the loop is
timed with every number of workers from 0 to 8, and with what was recommended, on two cores. Fails where a recommended
setting, applied, takes more than 15 % longer than the best of them.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import gpuwatch
from bench.loads import LOADS, Load, Training, step_milliseconds
from bench.quiet import quietest
from gpuwatch.catalog import LOADER_BEST_PREFETCH, LOADER_BEST_WORKERS
from gpuwatch.delivery import Setting
from gpuwatch.expr import History
from gpuwatch.history import history_of
from gpuwatch.reader import read_all

CORES = 2
MOST_WORKERS = 8
PREFETCH = 2
TOLERANCE = 1.15
TRIES = 2
"""Times something is measured at most until nobody else uses the cores meanwhile."""

FEWEST_STEPS, WATCHED_SECONDS = 60, 2.0


def main() -> int:
    """Print the table; 1 where a recommended setting is not near the best."""
    arguments = argparse.ArgumentParser(prog="bench.data", description=__doc__)
    arguments.add_argument("--rounds", type=int, default=3, help="times each setting is timed; the least counts")
    arguments.add_argument("--seconds", type=float, default=1.0, help="how long each time, once the loop runs evenly")
    arguments.add_argument("--loads", default="", help="only the loads whose name contains this")
    chosen = arguments.parse_args()
    keep_to_cores(CORES)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: that is what is tried
    print(f"{'load':32} {'seen with':>9} {'advice':>9} {'step':>8} {'best':>14} {'ratio':>6}", flush=True)
    missed = 0
    for load in LOADS:
        if chosen.loads in load.name:
            missed += judge(load, chosen.rounds, chosen.seconds)
    print("all within 15 %" if not missed else f"{missed} not within 15 %")
    return 1 if missed else 0


def keep_to_cores(count: int) -> None:
    """Only so many of the machine's cores, for this process and its workers."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def judge(load: Load, rounds: int, seconds: float) -> int:
    """Print what was recommended for a load beside the sweep; returns how many recommendations are off."""
    advice = {workers: recommended_from(load, Setting(workers, PREFETCH)) for workers in load.poor}
    settings = [Setting(workers, PREFETCH) for workers in range(MOST_WORKERS + 1)]
    tried = [*settings, *(setting for setting in advice.values() if setting)]
    measured, others = sweep(load, tried, rounds, seconds)
    best = min(settings, key=lambda setting: measured[setting])
    missed = 0
    for workers, setting in advice.items():
        if setting is None:
            print(f"{load.name:32} {workers:>9} nothing recommended", flush=True)
            missed += 1
            continue
        ratio = measured[setting] / measured[best]
        missed += ratio > TOLERANCE
        print(
            f"{load.name:32} {workers:>9} {shown(setting):>9} {measured[setting]:>5.1f} ms "
            f"{measured[best]:>5.1f} ms ({best.workers}) {ratio:>6.2f}{'  <-- not near' if ratio > TOLERANCE else ''}",
            flush=True,
        )
    times = " ".join(f"{measured[setting]:.1f}" for setting in settings)
    print(f"    workers 0 to {MOST_WORKERS}, ms a step: {times}; others took {others:.1f} cores meanwhile", flush=True)
    return missed


def recommended_from(load: Load, setting: Setting) -> Setting | None:
    """What is recommended to a run with this setting."""
    history, _ = quietest(lambda: watched(load, setting), TRIES)
    return recommended(history)


def watched(load: Load, setting: Setting) -> History:
    """What gpuwatch knows of a run over the load with this setting."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ.update(GPUWATCH_DIR=directory, GPUWATCH_DAEMON="0", GPUWATCH_QUIET="1")
        training = Training(load)
        loader = training.loader(setting, batches=100_000)
        begun = time.perf_counter()
        with gpuwatch.attach(training.model, loader):
            for step, end in enumerate(training.steps(loader)):
                if step >= FEWEST_STEPS and end - begun > WATCHED_SECONDS:
                    break
        (snapshot,), _ = read_all(Path(directory))
        return history_of(snapshot)


def recommended(history: History) -> Setting | None:
    """The setting that was recommended."""
    workers, prefetch = LOADER_BEST_WORKERS.value(history), LOADER_BEST_PREFETCH.value(history)
    return None if workers is None or prefetch is None else Setting(int(workers), int(prefetch))


def sweep(
    load: Load, settings: Iterable[Setting], rounds: int, seconds: float
) -> tuple[Mapping[Setting, float], float]:
    """Milliseconds of a step with each setting, in rounds in which they take turns; cores that others took, mean.

    The least counts: what else runs on the machine only ever adds to it.
    """
    measured: dict[Setting, list[float]] = {setting: [] for setting in settings}
    taken = []
    for _ in range(rounds):
        for setting, times in measured.items():
            spent, others = quietest(functools.partial(step_milliseconds, load, setting, seconds), TRIES)
            times.append(spent)
            taken.append(others)
    return {setting: min(times) for setting, times in measured.items()}, statistics.fmean(taken)


def shown(setting: Setting) -> str:
    """Workers and what each loads ahead."""
    return f"{setting.workers} x {setting.prefetch}" if setting.workers else "0"


if __name__ == "__main__":
    sys.exit(main())
