"""Waiting for data."""

from __future__ import annotations

from gpuwatch.catalog import (
    CPU_BUDGET,
    EPOCH_RESTART_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_START_SECONDS,
    LOADER_ITEM_SECONDS,
    LOADER_PERSISTENT,
    LOADER_WORKERS,
    PHASE_SECONDS,
    WINDOW_STEP_SECONDS,
    WINDOW_WAIT_SECONDS,
    WORKER_CPU_WAIT,
)
from gpuwatch.expr import Quantity, Rate, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, ramp

STEP_RATE = Rate(PHASE_SECONDS)
WAIT_SHARE = Rate(PHASE_SECONDS.where(phase="data")) / STEP_RATE
MEDIAN_STEP = WINDOW_STEP_SECONDS.where(quantile="0.5")

# A share alone is no evidence: on steps of a few milliseconds the queue of a worker is most of the time, and on a busy
# machine its wait was seen to reach 3 ms without any fault. And a batch indexed out of tensors in memory costs well
# under 50 us an item: a worker's queue would cost more.
WORTH_A_LOOK = WINDOW_WAIT_SECONDS >= 0.005
IN_MEMORY = LOADER_ITEM_SECONDS < 50e-6
# Workers that wait for a core themselves: the machine is crowded, and more of them would make it worse.
STARVED = WORKER_CPU_WAIT >= 0.3
STALLED = ((WAIT_SHARE >= 0.10) & WORTH_A_LOOK).unless(IN_MEMORY).unless(STARVED)

RESTART_SHARE = EPOCH_RESTART_SECONDS / (PHASE_SECONDS + EPOCH_START_SECONDS)
RESTART_COST = EPOCH_RESTART_SECONDS / EPOCH_RESTARTS

_SHARE = Quantity("share", WAIT_SHARE, "ratio")
_WAIT = Quantity("wait", WINDOW_WAIT_SECONDS, "seconds")
_STEP = Quantity("step", MEDIAN_STEP, "seconds")
_WORKERS = Quantity("workers", LOADER_WORKERS, "count")


def _phases(data: float, rest: float) -> dict[str, tuple[float, ...]]:
    """Phase counters of a run that spends these seconds of every minute on data and on the rest."""
    return {
        series_key(PHASE_SECONDS.name, {"phase": "data"}): ramp(data),
        series_key(PHASE_SECONDS.name, {"phase": "forward"}): ramp(rest),
    }


_MEDIAN_STEP_KEY = series_key(WINDOW_STEP_SECONDS.name, {"quantile": "0.5"})

RULES = (
    Rule(
        id="data-stall",
        title="Training waits on input",
        severity="warn",
        scope="rank",
        when=STALLED,
        critical_when=STALLED & (WAIT_SHARE >= 0.25),
        hold_minutes=2,
        value=_SHARE,
        quantities=(_WAIT, _STEP, _WORKERS),
        because=(
            "The training thread stands in the loader's next() while the device has nothing to do. "
            "The first batch of an epoch is counted apart, and so is the loader of an evaluation."
        ),
        evidence="{share} of step time is spent waiting for the next batch: {wait} of {step} (medians), "
        "{workers} loader workers",
        fix="Load ahead of the step: raise `num_workers` and `prefetch_factor`, set `persistent_workers=True`, or move "
        "decoding and augmentation to the device.",
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check="The data share of the time split falls below 10 %.",
        suppresses=("mem-headroom-unused",),
        techniques=("T01",),
        examples=(
            Example(
                "a quarter of each step",
                {**_phases(20, 40), WINDOW_WAIT_SECONDS.name: flat(0.025), _MEDIAN_STEP_KEY: flat(0.075)},
                True,
                "critical",
            ),
            Example("an eighth of each step", {**_phases(8, 52), WINDOW_WAIT_SECONDS.name: flat(0.012)}, True),
            Example("a large share of tiny steps", {**_phases(20, 40), WINDOW_WAIT_SECONDS.name: flat(0.001)}, False),
            Example(
                "workers without cores on a crowded machine",
                {**_phases(20, 40), WINDOW_WAIT_SECONDS.name: flat(0.025), WORKER_CPU_WAIT.name: flat(0.5)},
                False,
            ),
            Example(
                "workers with cores of their own",
                {**_phases(8, 52), WINDOW_WAIT_SECONDS.name: flat(0.012), WORKER_CPU_WAIT.name: flat(0.05)},
                True,
            ),
            Example("fed by its workers", {**_phases(2, 58), WINDOW_WAIT_SECONDS.name: flat(0.004)}, False),
            Example(
                "large batches of tensors in memory",
                {
                    **_phases(20, 40),
                    WINDOW_WAIT_SECONDS.name: flat(0.006),
                    LOADER_ITEM_SECONDS.name: flat(8e-6),
                },
                False,
            ),
            Example(
                "tensors in memory, an eighth of each step",
                {
                    **_phases(8, 52),
                    WINDOW_WAIT_SECONDS.name: flat(0.006),
                    LOADER_ITEM_SECONDS.name: flat(8e-6),
                },
                False,
            ),
        ),
    ),
    Rule(
        id="data-workers-zero",
        title="Batches are loaded on the training thread",
        severity="warn",
        scope="rank",
        when=((WAIT_SHARE >= 0.05) & WORTH_A_LOOK & LOADER_WORKERS.equals(0)).unless(IN_MEMORY),
        hold_minutes=2,
        value=_SHARE,
        quantities=(
            _WAIT,
            _STEP,
            Quantity("cores", CPU_BUDGET, "count"),
            Quantity("item", LOADER_ITEM_SECONDS, "seconds"),
        ),
        because=(
            "With `num_workers=0` every item is read and transformed between two steps, and nothing overlaps. "
            "Said only where loading is slow: on tensors in memory it is the right setting."
        ),
        evidence="`num_workers=0`, and {share} of step time goes into loading: {wait} of {step} (medians), {item} an "
        "item; this rank may use {cores} cores",
        fix="Pass `num_workers` to the DataLoader (start with 2, go up to the cores this rank may use) and "
        "`persistent_workers=True`.",
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check="The data share of the time split falls below 5 %.",
        suppresses=("data-stall",),
        techniques=("T01",),
        examples=(
            Example(
                "slow items, no workers",
                {**_phases(30, 30), WINDOW_WAIT_SECONDS.name: flat(0.016), LOADER_WORKERS.name: flat(0),
                 LOADER_ITEM_SECONDS.name: flat(0.002)},
                True,
            ),
            Example(
                "tensors in memory, no workers",
                {**_phases(20, 40), WINDOW_WAIT_SECONDS.name: flat(0.004), LOADER_WORKERS.name: flat(0),
                 LOADER_ITEM_SECONDS.name: flat(6e-6)},
                False,
            ),
            Example(
                "slow items, but workers",
                {**_phases(30, 30), WINDOW_WAIT_SECONDS.name: flat(0.016), LOADER_WORKERS.name: flat(2)},
                False,
            ),
        ),
    ),
    Rule(
        id="data-epoch-restart",
        title="Workers are started anew at every epoch",
        severity="warn",
        scope="rank",
        # Short epochs pay most: a start of 0.2 s is nothing in an hour and most of an epoch of ten steps. A start of
        # seconds is worth a word at a smaller share.
        when=(((RESTART_SHARE >= 0.05) & (RESTART_COST >= 0.1)) | ((RESTART_SHARE >= 0.02) & (RESTART_COST >= 2)))
        & (EPOCH_RESTARTS >= 2)
        & (LOADER_WORKERS > 0)
        & LOADER_PERSISTENT.equals(0),
        value=Quantity("share", RESTART_SHARE, "ratio"),
        quantities=(
            Quantity("cost", RESTART_COST, "seconds"),
            Quantity("restarts", EPOCH_RESTARTS, "count"),
            _WORKERS,
        ),
        because=(
            "Without `persistent_workers=True` the loader stops its workers at the end of an epoch and starts new "
            "ones, which import, open and warm up again while the device waits. A median over steps hides it."
        ),
        evidence="the first batch of an epoch took {cost} at {restarts} restarts of {workers} workers: {share} of "
        "training time",
        fix="Pass `persistent_workers=True` to the DataLoader, or make epochs longer with a repeating sampler.",
        gain=Gain("the wait at epoch starts", removable=RESTART_SHARE),
        check="The wait for an epoch's first batch falls to that of any other batch.",
        techniques=("T01",),
        examples=(
            Example(
                "short epochs",
                {
                    **_phases(1, 30), EPOCH_START_SECONDS.name: ramp(20), EPOCH_RESTART_SECONDS.name: ramp(20),
                    EPOCH_RESTARTS.name: ramp(100), LOADER_WORKERS.name: flat(2), LOADER_PERSISTENT.name: flat(0),
                },
                True,
            ),
            Example(
                "slow start of long epochs",
                {
                    **_phases(1, 57), EPOCH_START_SECONDS.name: ramp(3), EPOCH_RESTART_SECONDS.name: ramp(3),
                    EPOCH_RESTARTS.name: ramp(1), LOADER_WORKERS.name: flat(8), LOADER_PERSISTENT.name: flat(0),
                },
                True,
            ),
            Example(
                "a start that is lost in a long epoch",
                {
                    **_phases(1, 58.5), EPOCH_START_SECONDS.name: ramp(0.5), EPOCH_RESTART_SECONDS.name: ramp(0.5),
                    EPOCH_RESTARTS.name: ramp(0.3), LOADER_WORKERS.name: flat(8), LOADER_PERSISTENT.name: flat(0),
                },
                False,
            ),
            Example(
                "persistent workers with a slow first item",
                {
                    **_phases(1, 30), EPOCH_START_SECONDS.name: ramp(20), EPOCH_RESTART_SECONDS.name: ramp(20),
                    EPOCH_RESTARTS.name: ramp(100), LOADER_WORKERS.name: flat(2), LOADER_PERSISTENT.name: flat(1),
                },
                False,
            ),
        ),
    ),
)  # fmt: skip
