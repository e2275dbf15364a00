"""Waiting for data: that it happens, and what the settings of the loader have to do with it."""

from __future__ import annotations

from gpuwatch.catalog import (
    EPOCH_RESTART_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_START_SECONDS,
    LOADER_BEST_WORKERS,
    LOADER_ITEM_SECONDS,
    LOADER_ORDER_SECONDS,
    LOADER_OWN_RATIO,
    LOADER_PERSISTENT,
    LOADER_RECEIVE_CPU_SECONDS,
    LOADER_WORKERS,
    WINDOW_WAIT_SECONDS,
    WORKER_CPU_WAIT,
)
from gpuwatch.expr import Quantity
from gpuwatch.rulebook.rule import Clause, Example, Gain, Rule, flat, ramp
from gpuwatch.rulebook.waiting import (
    ADVICE,
    CORES,
    CROWD,
    CROWDED_OUT,
    EXPECTED,
    IN_MEMORY,
    MEDIAN_STEP_KEY,
    ON_TRAINING_THREAD,
    OWN_WORK,
    RECOMMENDED,
    RESTART_COST,
    RESTART_SHARE,
    SAMPLER_PART,
    SHARE,
    SLOW_ORDER,
    SLOW_SAMPLER,
    STALLED,
    STEP,
    WAIT,
    WAIT_SHARE,
    WORKERS,
    WORTH_A_LOOK,
    bursts,
    phases,
    waits,
)

RULES = (
    Rule(
        id="data-stall",
        title="Training waits on input",
        severity="warn",
        scope="rank",
        when=STALLED,
        critical_when=STALLED & (WAIT_SHARE >= 0.25),
        hold_minutes=2,
        value=SHARE,
        quantities=(
            WAIT,
            STEP,
            EXPECTED,
            WORKERS,
            Quantity("sampler", SAMPLER_PART, "seconds"),
            Quantity("receiving", LOADER_RECEIVE_CPU_SECONDS, "seconds"),
            *RECOMMENDED,
        ),
        clauses=(
            Clause(
                "The sampler takes {sampler} for the indices of a batch, on the training thread: that is what the step "
                "waits for, and workers cannot take it over.",
                when=ON_TRAINING_THREAD & SLOW_SAMPLER,
            ),
            Clause(
                "Taking a batch from its worker costs the training thread {receiving} of CPU time: that is what the "
                "step waits for, and more workers cannot take it over.",
                when=(ON_TRAINING_THREAD & (LOADER_RECEIVE_CPU_SECONDS > 0)).unless(SLOW_SAMPLER),
            ),
            *ADVICE,
        ),
        advice=(
            (
                ON_TRAINING_THREAD & SLOW_SAMPLER,
                "Make the sampler yield what it has ready: draw the order of an epoch once, as one tensor or array, "
                "convert it once (`.tolist()` before the loop, not in it), sort and bucket before the epoch.",
            ),
            (
                ON_TRAINING_THREAD,
                "Let `collate_fn` return a few tensors: they come over in shared memory, while lists, dicts and "
                "objects of Python's are pickled in the worker and unpickled, one by one, on the training thread.",
            ),
        ),
        because=(
            "The training thread stands in the loader's next() while the device has nothing to do. "
            "The first batch of an epoch is counted apart, and so is the loader of an evaluation. Said only where no "
            "rule of the data path knows the cause."
        ),
        evidence="{share} of step time is spent waiting for the next batch: {wait} of {step} (medians); "
        "by what batches cost, a step has to wait {expected} on average; there are {workers} loader workers",
        fix="Load ahead of the step: raise `num_workers` and `prefetch_factor`, set `persistent_workers=True`, or move "
        "decoding and augmentation to the device.",
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check="The data share of the time split falls below 10 %.",
        suppresses=("mem-headroom-unused", "comp-step-jitter"),
        techniques=("T01",),
        examples=(
            Example(
                "a sampler that sorts anew for each batch, for a third of each step",
                {
                    **phases(20, 40),
                    WINDOW_WAIT_SECONDS.name: flat(0.012),
                    LOADER_ITEM_SECONDS.name: flat(8e-6),
                    **OWN_WORK,
                },
                True,
                "critical",
            ),
            Example(
                "a sampler that sorts anew for each batch, of tensors in memory",
                {
                    **phases(8, 52),
                    WINDOW_WAIT_SECONDS.name: flat(0.012),
                    LOADER_ITEM_SECONDS.name: flat(8e-6),
                    **OWN_WORK,
                },
                True,
            ),
            Example(
                "a quarter of each step",
                {**phases(20, 40), WINDOW_WAIT_SECONDS.name: flat(0.025), MEDIAN_STEP_KEY: flat(0.075)},
                True,
                "critical",
            ),
            Example("an eighth of each step", {**phases(8, 52), WINDOW_WAIT_SECONDS.name: flat(0.012)}, True),
            Example("workers that hand over their batches together", bursts(), True, "critical"),
            Example("the same, a sixth of each step", bursts(share=1 / 6), True),
            Example("hiccups of a busy machine", bursts(expected=0.0005), False),
            Example("a large share of tiny steps", {**phases(20, 40), WINDOW_WAIT_SECONDS.name: flat(0.001)}, False),
            Example(
                "workers without cores on a crowded machine",
                {**phases(20, 40), WINDOW_WAIT_SECONDS.name: flat(0.025), WORKER_CPU_WAIT.name: flat(0.5)},
                False,
            ),
            Example(
                "a crowd of other programs",
                {**phases(20, 40), WINDOW_WAIT_SECONDS.name: flat(0.025), **CROWD},
                False,
            ),
            Example("a crowd of other programs, an eighth of each step", {**waits(share=1 / 8), **CROWD}, False),
            Example(
                "workers with cores of their own",
                {**phases(8, 52), WINDOW_WAIT_SECONDS.name: flat(0.012), WORKER_CPU_WAIT.name: flat(0.05)},
                True,
            ),
            Example(
                "objects to unpickle, on a crowded machine",
                {
                    **phases(8, 52),
                    WINDOW_WAIT_SECONDS.name: flat(0.030),
                    WORKER_CPU_WAIT.name: flat(0.5),
                    **OWN_WORK,
                },
                True,
            ),
            Example(
                "a sampler that costs little, of tensors in memory",
                {
                    **phases(20, 40),
                    WINDOW_WAIT_SECONDS.name: flat(0.012),
                    LOADER_ITEM_SECONDS.name: flat(8e-6),
                    LOADER_OWN_RATIO.name: flat(0.1),
                },
                False,
            ),
            Example(
                "a sampler that costs little, of tensors in memory, an eighth of each step",
                {
                    **phases(8, 52),
                    WINDOW_WAIT_SECONDS.name: flat(0.012),
                    LOADER_ITEM_SECONDS.name: flat(8e-6),
                    LOADER_OWN_RATIO.name: flat(0.1),
                },
                False,
            ),
            Example(
                "a sampler that sorts anew, of no consequence",
                {**phases(2, 58), WINDOW_WAIT_SECONDS.name: flat(0.004), **OWN_WORK},
                False,
            ),
            Example("fed by its workers", {**phases(2, 58), WINDOW_WAIT_SECONDS.name: flat(0.004)}, False),
            Example(
                "large batches of tensors in memory",
                {
                    **phases(20, 40),
                    WINDOW_WAIT_SECONDS.name: flat(0.006),
                    LOADER_ITEM_SECONDS.name: flat(8e-6),
                },
                False,
            ),
            Example(
                "tensors in memory, an eighth of each step",
                {
                    **phases(8, 52),
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
        # Where there is no core to spare, a worker would be no better off.
        when=((WAIT_SHARE >= 0.05) & WORTH_A_LOOK & LOADER_WORKERS.equals(0))
        .unless(IN_MEMORY)
        .unless(ON_TRAINING_THREAD)
        .unless(CROWDED_OUT | LOADER_BEST_WORKERS.equals(0)),
        hold_minutes=2,
        value=SHARE,
        quantities=(WAIT, STEP, CORES, Quantity("item", LOADER_ITEM_SECONDS, "seconds"), *RECOMMENDED),
        clauses=ADVICE,
        because=(
            "With `num_workers=0` every item is read and transformed between two steps, and nothing overlaps. "
            "Said only where loading is slow: on tensors in memory it is the right setting."
        ),
        evidence="`num_workers=0`, and {share} of step time goes into loading: {wait} of {step} (medians); "
        "an item takes {item}; this rank may use {cores} cores",
        fix="Pass `num_workers` and `persistent_workers=True` to the DataLoader, so that batches are made beside "
        "training.",
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check="The data share of the time split falls below 5 %.",
        suppresses=("data-stall", "comp-step-jitter"),
        techniques=("T01",),
        examples=(
            Example(
                "slow items, no workers",
                {**phases(30, 30), WINDOW_WAIT_SECONDS.name: flat(0.016), LOADER_WORKERS.name: flat(0),
                 LOADER_ITEM_SECONDS.name: flat(0.002), LOADER_BEST_WORKERS.name: flat(3)},
                True,
            ),
            Example(
                "slow items and no core to spare",
                {**phases(30, 30), WINDOW_WAIT_SECONDS.name: flat(0.016), LOADER_WORKERS.name: flat(0),
                 LOADER_ITEM_SECONDS.name: flat(0.002), LOADER_BEST_WORKERS.name: flat(0)},
                False,
            ),
            Example(
                "items that are slow for a crowd",
                {**phases(30, 30), WINDOW_WAIT_SECONDS.name: flat(0.016), LOADER_WORKERS.name: flat(0),
                 LOADER_ITEM_SECONDS.name: flat(0.002), LOADER_BEST_WORKERS.name: flat(3), **CROWD},
                False,
            ),
            Example(
                "slow items, and a sampler that is slower",
                {**phases(30, 30), WINDOW_WAIT_SECONDS.name: flat(0.016), LOADER_WORKERS.name: flat(0),
                 LOADER_ITEM_SECONDS.name: flat(0.002), LOADER_BEST_WORKERS.name: flat(3), **OWN_WORK},
                False,
            ),
            Example(
                "tensors in memory, no workers",
                {**phases(20, 40), WINDOW_WAIT_SECONDS.name: flat(0.004), LOADER_WORKERS.name: flat(0),
                 LOADER_ITEM_SECONDS.name: flat(6e-6)},
                False,
            ),
            Example(
                "slow items, but workers",
                {**phases(30, 30), WINDOW_WAIT_SECONDS.name: flat(0.016), LOADER_WORKERS.name: flat(2)},
                False,
            ),
        ),
    ),
    Rule(
        id="data-epoch-restart",
        title="Epochs begin with a long wait",
        severity="warn",
        scope="rank",
        # Short epochs pay most: a start of 0.2 s is nothing in an hour and most of an epoch of ten steps. A start of
        # seconds is worth a word at a smaller share.
        when=(((RESTART_SHARE >= 0.05) & (RESTART_COST >= 0.1)) | ((RESTART_SHARE >= 0.02) & (RESTART_COST >= 2)))
        & (EPOCH_RESTARTS >= 2)
        & (((LOADER_WORKERS > 0) & LOADER_PERSISTENT.equals(0)) | SLOW_ORDER),
        value=Quantity("share", RESTART_SHARE, "ratio"),
        quantities=(
            Quantity("cost", RESTART_COST, "seconds"),
            Quantity("restarts", EPOCH_RESTARTS, "count"),
            Quantity("order", LOADER_ORDER_SECONDS, "seconds"),
            WORKERS,
        ),
        because=(
            "Without `persistent_workers=True` the loader stops its workers at the end of an epoch and starts new "
            "ones, which import, open and warm up again while the device waits. Or the sampler draws the order of a "
            "long epoch, on the training thread. A median over steps hides both."
        ),
        evidence="the first batch of an epoch took {cost} at {restarts} restarts of {workers} workers: {share} of "
        "training time; the sampler took {order} of it",
        fix="Pass `persistent_workers=True` to the DataLoader, or make epochs longer with a repeating sampler.",
        advice=(
            (
                SLOW_ORDER,
                "Draw no more indices than an epoch uses (`num_samples`), keep the iterator over epochs that are cut "
                "short, or draw the order as one array that the sampler slices.",
            ),
        ),
        gain=Gain("the wait at epoch starts", removable=RESTART_SHARE),
        check="The wait for an epoch's first batch falls to that of any other batch.",
        techniques=("T01",),
        examples=(
            Example(
                "short epochs",
                {
                    **phases(1, 30), EPOCH_START_SECONDS.name: ramp(20), EPOCH_RESTART_SECONDS.name: ramp(20),
                    EPOCH_RESTARTS.name: ramp(100), LOADER_WORKERS.name: flat(2), LOADER_PERSISTENT.name: flat(0),
                },
                True,
            ),
            Example(
                "slow start of long epochs",
                {
                    **phases(1, 57), EPOCH_START_SECONDS.name: ramp(3), EPOCH_RESTART_SECONDS.name: ramp(3),
                    EPOCH_RESTARTS.name: ramp(1), LOADER_WORKERS.name: flat(8), LOADER_PERSISTENT.name: flat(0),
                },
                True,
            ),
            Example(
                "a start that is lost in a long epoch",
                {
                    **phases(1, 58.5), EPOCH_START_SECONDS.name: ramp(0.5), EPOCH_RESTART_SECONDS.name: ramp(0.5),
                    EPOCH_RESTARTS.name: ramp(0.3), LOADER_WORKERS.name: flat(8), LOADER_PERSISTENT.name: flat(0),
                },
                False,
            ),
            Example(
                "a weighted order of millions at every epoch",
                {
                    **phases(1, 30), EPOCH_START_SECONDS.name: ramp(20), EPOCH_RESTART_SECONDS.name: ramp(20),
                    EPOCH_RESTARTS.name: ramp(20), LOADER_WORKERS.name: flat(0), LOADER_PERSISTENT.name: flat(0),
                    LOADER_ORDER_SECONDS.name: flat(0.9),
                },
                True,
            ),
            Example(
                "no workers, and a first item that is slow",
                {
                    **phases(1, 30), EPOCH_START_SECONDS.name: ramp(20), EPOCH_RESTART_SECONDS.name: ramp(20),
                    EPOCH_RESTARTS.name: ramp(20), LOADER_WORKERS.name: flat(0), LOADER_PERSISTENT.name: flat(0),
                    LOADER_ORDER_SECONDS.name: flat(0.1),
                },
                False,
            ),
            Example(
                "persistent workers with a slow first item",
                {
                    **phases(1, 30), EPOCH_START_SECONDS.name: ramp(20), EPOCH_RESTART_SECONDS.name: ramp(20),
                    EPOCH_RESTARTS.name: ramp(100), LOADER_WORKERS.name: flat(2), LOADER_PERSISTENT.name: flat(1),
                },
                False,
            ),
        ),
    ),
)  # fmt: skip
