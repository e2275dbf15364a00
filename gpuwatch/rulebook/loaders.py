"""How the program uses its loaders: iterators and loaders made again and again, items made again at every epoch."""

from __future__ import annotations

from gpuwatch.catalog import (
    BATCHES,
    EPOCH_RESTART_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_START_SECONDS,
    EPOCH_STARTS,
    HOST_AVAILABLE,
    LOADER_BATCH,
    LOADER_BATCH_BYTES,
    LOADER_DATASET_ITEMS,
    LOADER_ITEM_SECONDS,
    LOADER_WORKERS,
    LOADERS_BUILT,
    WORKERS_IDLE,
)
from gpuwatch.expr import Quantity
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, ramp
from gpuwatch.rulebook.waiting import (
    CROWD,
    MAKING,
    ON_TRAINING_THREAD,
    OWN_WORK,
    RESTART_COST,
    RESTART_SHARE,
    SHARE,
    WAIT_SHARE,
    WAITING,
    WORKERS,
    bursts,
    phases,
    waits,
)

GIB = 1 << 30

EPOCH_BATCHES = LOADER_DATASET_ITEMS / LOADER_BATCH
DATASET_BYTES = LOADER_BATCH_BYTES / LOADER_BATCH * LOADER_DATASET_ITEMS


def _started(starts: float, batches: float, items: float = 5000, cost: float = 0.001) -> dict[str, tuple[float, ...]]:
    """So many starts of a loader and batches a minute, of a data set of so many items; seconds of each start."""
    return {
        EPOCH_STARTS.name: ramp(starts),
        EPOCH_RESTARTS.name: ramp(starts),
        EPOCH_RESTART_SECONDS.name: ramp(starts * cost),
        BATCHES.name: ramp(batches),
        LOADER_DATASET_ITEMS.name: flat(items),
        LOADER_BATCH.name: flat(50),
    }


def _built(loaders: float, workers: float, cost: float, training: float = 50) -> dict[str, tuple[float, ...]]:
    """So many loaders in ten minutes, each with an epoch; seconds of each start, and of a minute in steps."""
    return {
        **phases(0.01 * training, training),
        EPOCH_START_SECONDS.name: ramp(10 * cost),
        EPOCH_RESTARTS.name: ramp(10),
        EPOCH_RESTART_SECONDS.name: ramp(10 * cost),
        LOADERS_BUILT.name: flat(loaders),
        LOADER_WORKERS.name: flat(workers),
        WORKERS_IDLE.name: flat(0),
    }


def _without(name: str, series: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    return {key: values for key, values in series.items() if key != name}


def _decoded(items: float, restarts: float = 1, wait: float = 0.025) -> dict[str, tuple[float, ...]]:
    """A run that waits for data sets of so many items of 600 kB on a machine with 64 GiB to spare."""
    return {
        **waits(wait, 1 / 3 if wait > 0.005 else 0.02),
        EPOCH_RESTARTS.name: flat(restarts),
        LOADER_DATASET_ITEMS.name: flat(items),
        LOADER_BATCH.name: flat(64),
        LOADER_BATCH_BYTES.name: flat(64 * 600_000),
        HOST_AVAILABLE.name: flat(64 * GIB),
    }


RULES = (
    Rule(
        id="data-single-batch-iter",
        title="A new iterator of the loader is made for every batch",
        severity="warn",
        scope="rank",
        # Where an epoch has one batch, a new iterator for each is as it should be. Where the length is not known, it
        # must at least cost something.
        when=(EPOCH_STARTS / BATCHES >= 0.8)
        & (EPOCH_STARTS >= 20)
        & ((EPOCH_BATCHES >= 2) | (RESTART_COST >= 0.02).unless(LOADER_DATASET_ITEMS >= 1)),
        value=Quantity("iterators", EPOCH_STARTS, "count"),
        quantities=(
            Quantity("batches", BATCHES, "count"),
            Quantity("cost", RESTART_COST, "seconds"),
            Quantity("epoch", EPOCH_BATCHES, "count"),
        ),
        because=(
            "`next(iter(loader))` begins an epoch, takes its first batch and throws the rest away: with workers it "
            "starts all of them, with a shuffle it draws an order of the whole data set, and without one it is the "
            "same batch every time."
        ),
        evidence="{iterators} iterators for {batches} batches; an epoch has {epoch} batches; each start costs {cost}",
        fix="Make one iterator and keep it: `batches = iter(loader)` before the loop, `next(batches)` in it, and a new "
        "one when it is exhausted.",
        gain=Gain("the start of an epoch at every step", removable=RESTART_SHARE),
        check="`gpuwatch_epoch_starts_total` grows by one an epoch.",
        suppresses=("data-epoch-restart", "data-stall", "data-workers-zero", "data-loader-rebuilt"),
        techniques=("T01",),
        examples=(
            Example(
                "one for each batch of a stream, with workers",
                _without(LOADER_DATASET_ITEMS.name, _started(60, 60, cost=0.08)),
                True,
            ),
            Example("one for each batch", _started(60, 60), True),
            Example("the whole data set is one batch", _started(60, 60, items=50), False),
            Example("the whole data set is one batch of workers", _started(60, 60, items=50, cost=0.08), False),
            Example("a stream of one batch", _without(LOADER_DATASET_ITEMS.name, _started(60, 60)), False),
            Example("one for each epoch", _started(1, 100), False),
            Example("a few at the start", {**_started(0.4, 0.4), EPOCH_STARTS.name: ramp(0.5)}, False),
        ),
    ),
    Rule(
        id="data-loader-rebuilt",
        title="The loader is made anew again and again, and its workers with it",
        severity="warn",
        scope="rank",
        # Those of one loader may be on their way out, or wait for the next evaluation.
        when=((WORKERS_IDLE / LOADER_WORKERS >= 2) & (WORKERS_IDLE >= 2))
        | ((LOADERS_BUILT >= 3) & (LOADER_WORKERS > 0) & (RESTART_SHARE >= 0.05) & (RESTART_COST >= 0.02)),
        hold_minutes=1,
        value=Quantity("idle", WORKERS_IDLE, "count"),
        quantities=(
            WORKERS,
            Quantity("built", LOADERS_BUILT, "count"),
            Quantity("cost", RESTART_COST, "seconds"),
            Quantity("restarting", RESTART_SHARE, "ratio"),
        ),
        suppresses=("data-epoch-restart",),
        because=(
            "A loader over the same data was made anew, again and again: its workers start anew each time, whatever "
            "`persistent_workers` says, and where something still refers to the old ones (or to their iterators) their "
            "workers live on, each with its memory. A loader that is used again at every epoch, such as that of a "
            "validation, is not counted."
        ),
        evidence="a loader of {workers} workers is made anew; {built} were made over the same data; the first batch "
        "of a new one takes {cost}, {restarting} of training time; {idle} worker processes belong to loaders that "
        "nobody iterates any more",
        fix="Make the loader once, before the loop over epochs. Where it must be made anew, leave out "
        "`persistent_workers=True` and keep neither the loader nor its iterator.",
        gain=Gain("the starts of the workers, and the memory of those left over"),
        check="`gpuwatch_loaders_built_total` stays at 1 and `gpuwatch_loader_idle_workers` at 0.",
        techniques=("T01",),
        examples=(
            Example("kept at every epoch", {WORKERS_IDLE.name: ramp(2), LOADER_WORKERS.name: flat(2)}, True),
            Example("a new one at every epoch", _built(9, 1, 0.4), True),
            Example("a new one at every epoch, without workers", _built(9, 0, 0.4), False),
            Example("a new one at every epoch of an hour", _built(9, 2, 0.4, training=600), False),
            Example("a new one at every epoch, quickly started", _built(9, 2, 0.005, training=0.5), False),
            Example("one for the whole run", _built(1, 2, 0.4), False),
            Example("a loader that has just ended", {WORKERS_IDLE.name: flat(4), LOADER_WORKERS.name: flat(4)}, False),
            Example(
                "one worker that has just ended", {WORKERS_IDLE.name: flat(1), LOADER_WORKERS.name: flat(0.5)}, False
            ),
            Example("none", {WORKERS_IDLE.name: flat(0), LOADER_WORKERS.name: flat(4)}, False),
        ),
    ),
    Rule(
        id="data-not-cached",
        title="The items are made again at every epoch, and all of them would fit in memory",
        severity="info",
        scope="rank",
        when=(WAITING & (EPOCH_RESTARTS >= 1) & (DATASET_BYTES / HOST_AVAILABLE <= 0.5)).unless(ON_TRAINING_THREAD),
        hold_minutes=2,
        value=Quantity("size", DATASET_BYTES, "bytes"),
        quantities=(
            SHARE,
            Quantity("items", LOADER_DATASET_ITEMS, "count"),
            Quantity("available", HOST_AVAILABLE, "bytes"),
            Quantity("making", MAKING, "seconds"),
            Quantity("restarts", EPOCH_RESTARTS, "count"),
        ),
        because=(
            "After the first epoch too, training waits for items that it has had before. As they come out of the "
            "loader, all of them take less than half of the host memory that is free. Whether they are the same at "
            "every epoch cannot be seen."
        ),
        evidence="{items} items, as they come, are {size}; {available} of host memory are free; after {restarts} "
        "restarts {share} of step time is still spent waiting; a batch takes {making} to make",
        fix="If items are the same at every epoch (or up to a cheap random part), keep them: decoded in one tensor or "
        "`numpy.memmap` before the loader starts, so that workers share it, or decoded on a local disk. Cache what "
        "comes before the random augmentation, not after it.",
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check="The data share falls from the second epoch on.",
        techniques=("T03",),
        examples=(
            Example("a small data set, decoded at every epoch", _decoded(30_000), True),
            Example("decoded at every epoch, in batches that come together", {**_decoded(30_000), **bursts()}, True),
            Example("a data set larger than memory", _decoded(1_200_000), False),
            Example("a crowd", {**_decoded(30_000), **CROWD}, False),
            Example("a slow sampler", {**_decoded(30_000), **OWN_WORK}, False),
            Example("the first epoch", _decoded(30_000, restarts=0), False),
            Example("no wait", _decoded(30_000, wait=0.001), False),
            Example("tensors in memory", {**_decoded(30_000), LOADER_ITEM_SECONDS.name: flat(8e-6)}, False),
        ),
    ),
)  # fmt: skip
