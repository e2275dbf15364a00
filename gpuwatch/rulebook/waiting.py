"""What the rules on waiting for data share: when a run waits, what is recommended, and runs to try them on."""

from __future__ import annotations

from gpuwatch.catalog import (
    CPU_BUDGET,
    EPOCH_RESTART_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_START_SECONDS,
    LOADER_AFFORDABLE,
    LOADER_ALONE,
    LOADER_BATCH_SECONDS,
    LOADER_BEST_PREFETCH,
    LOADER_BEST_WAIT,
    LOADER_BEST_WORKERS,
    LOADER_CROWDED,
    LOADER_EXPECTED_WAIT,
    LOADER_ITEM_SECONDS,
    LOADER_ORDER_SECONDS,
    LOADER_OWN_RATIO,
    LOADER_PART_SECONDS,
    LOADER_WORKERS,
    PHASE_SECONDS,
    WINDOW_STEP_SECONDS,
    WINDOW_WAIT_SECONDS,
    WORKER_CPU_WAIT,
)
from gpuwatch.expr import Quantity, Rate, Recorded, series_key
from gpuwatch.limits import SHORT_WAIT_SECONDS, STARVED_WORKERS
from gpuwatch.rulebook.rule import Clause, flat, ramp

# Computed once for all rules that read them: of all that a fleet's Prometheus does, these rates cost most.
STEP_RATE = Recorded("rank:gpuwatch_phase_seconds:rate", Rate(PHASE_SECONDS))
WAIT_SHARE = Recorded("rank:gpuwatch_data_wait:ratio", Rate(PHASE_SECONDS.where(phase="data")) / STEP_RATE)
MEDIAN_STEP = WINDOW_STEP_SECONDS.where(quantile="0.5")
MAKING = LOADER_BATCH_SECONDS.where(quantile="0.5")

# A share alone is no evidence: on steps of a few milliseconds the queue of a worker is most of the time, and on a busy
# machine its wait was seen to reach 3 ms without any fault. And a batch indexed out of tensors in memory costs well
# under 50 us an item: a worker's queue would cost more.
# Workers that sleep for the same time hand over their batches together: then most steps wait for nothing, and the rest
# for long. A mean would tell, and be taken in by every hiccup of a busy machine; what a step has to wait by what its
# batches cost is not.
WORTH_A_LOOK = WINDOW_WAIT_SECONDS >= SHORT_WAIT_SECONDS
HELD_UP = WORTH_A_LOOK | (LOADER_EXPECTED_WAIT >= SHORT_WAIT_SECONDS)
IN_MEMORY = LOADER_ITEM_SECONDS < 50e-6
# Workers that wait for a core themselves: the machine is crowded, and more of them would make it worse.
STARVED = WORKER_CPU_WAIT >= STARVED_WORKERS
# Nor is a crowd a fault of the loader's.
CROWDED_OUT = LOADER_CROWDED.equals(1)
LONG_WAIT = ((WAIT_SHARE >= 0.10) & HELD_UP).unless(CROWDED_OUT)
WAITING = LONG_WAIT.unless(IN_MEMORY)
# What the training thread itself does for a batch, which no worker could do for it: the sampler runs on it, and so
# does the unpickling of what is no tensor.
SAMPLER_PART = LOADER_PART_SECONDS.where(part="sampler")
ON_TRAINING_THREAD = LOADER_OWN_RATIO >= 0.5
SLOW_SAMPLER = SAMPLER_PART / WINDOW_WAIT_SECONDS >= 0.5
# What the training thread does itself is no matter of items in memory, nor of workers without cores.
STALLED = LONG_WAIT.unless((IN_MEMORY | STARVED).unless(ON_TRAINING_THREAD))

RESTART_SHARE = EPOCH_RESTART_SECONDS / (PHASE_SECONDS + EPOCH_START_SECONDS)
RESTART_COST = EPOCH_RESTART_SECONDS / EPOCH_RESTARTS
SLOW_ORDER = LOADER_ORDER_SECONDS / RESTART_COST >= 0.5

SHARE = Quantity("share", WAIT_SHARE, "ratio")
WAIT = Quantity("wait", WINDOW_WAIT_SECONDS, "seconds")
EXPECTED = Quantity("expected", LOADER_EXPECTED_WAIT, "seconds")
STEP = Quantity("step", MEDIAN_STEP, "seconds")
WORKERS = Quantity("workers", LOADER_WORKERS, "count")
CORES = Quantity("cores", CPU_BUDGET, "count")

RECOMMENDED = (
    Quantity("best", LOADER_BEST_WORKERS, "count"),
    Quantity("ahead", LOADER_BEST_PREFETCH, "count"),
    Quantity("left", LOADER_BEST_WAIT, "ratio"),
    Quantity("making", LOADER_ALONE, "seconds"),
    Quantity("affordable", LOADER_AFFORDABLE, "seconds"),
)
"""What the clauses below name."""

SETTING = Clause(
    "By this run's own costs `num_workers={best}, prefetch_factor={ahead}` is enough: about {left} of step time would "
    "still be spent waiting.",
    when=((LOADER_BEST_WAIT < 0.05) & (LOADER_BEST_WORKERS > 0)).unless(ON_TRAINING_THREAD),
)
BEST_SETTING = Clause(
    "By this run's own costs `num_workers={best}, prefetch_factor={ahead}` is the best there is, and {left} of step "
    "time would still be spent waiting.",
    when=((LOADER_BEST_WAIT >= 0.05) & (LOADER_BEST_WORKERS > 0)).unless(ON_TRAINING_THREAD),
)
SHRINK = Clause(
    "For training not to wait, making a batch must come down from {making} to about {affordable}.",
    when=((LOADER_BEST_WAIT >= 0.05) & (LOADER_AFFORDABLE > 0)).unless(ON_TRAINING_THREAD),
)
ADVICE = (SETTING, BEST_SETTING, SHRINK)
"""The number of workers that this run needs, or what else has to shrink."""

TO_WORKERS = tuple(
    Clause(clause.text, clause.when & (LOADER_WORKERS > 0)) for clause in ADVICE if clause.when is not None
)
"""The same where there are workers: without any, another rule says it."""


def phases(data: float, rest: float) -> dict[str, tuple[float, ...]]:
    """Phase counters of a run that spends these seconds of every minute on data and on the rest."""
    return {
        series_key(PHASE_SECONDS.name, {"phase": "data"}): ramp(data),
        series_key(PHASE_SECONDS.name, {"phase": "forward"}): ramp(rest),
    }


def waits(seconds: float = 0.025, share: float = 1 / 3, workers: float | None = None) -> dict[str, tuple[float, ...]]:
    """A run that waits so long for a batch, for so much of its time."""
    known = {**phases(60 * share, 60 * (1 - share)), WINDOW_WAIT_SECONDS.name: flat(seconds)}
    return known if workers is None else {**known, LOADER_WORKERS.name: flat(workers)}


def bursts(share: float = 1 / 3, expected: float = 0.014, workers: float = 4) -> dict[str, tuple[float, ...]]:
    """A run whose workers hand over their batches together: most steps wait for nothing."""
    return {**waits(0.0002, share, workers), LOADER_EXPECTED_WAIT.name: flat(expected)}


MEDIAN_STEP_KEY = series_key(WINDOW_STEP_SECONDS.name, {"quantile": "0.5"})
CROWD = {LOADER_CROWDED.name: flat(1)}
"""A run whose batches are late for want of cores, and of nothing else."""

OWN_WORK = {LOADER_OWN_RATIO.name: flat(0.8)}
"""A run whose training thread waits for nothing but its own work."""

MAKING_KEY = series_key(LOADER_BATCH_SECONDS.name, {"quantile": "0.5"})
