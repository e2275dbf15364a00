"""Why making batches is slow: what the items wait for, or compute, and what collation takes."""

from __future__ import annotations

from gpuwatch.catalog import (
    BATCHES,
    CPU_BUDGET,
    CPU_WAIT_SECONDS,
    LOADER_BATCH,
    LOADER_BATCH_CPU_SECONDS,
    LOADER_NEEDED_CORES,
    LOADER_PART_SECONDS,
    LOADER_WORKERS,
    PHASE_SECONDS,
    WORKER_BLOCKED,
    WORKER_BUSY,
    WORKER_CPU,
    WORKER_CPU_WAIT,
)
from gpuwatch.expr import Quantity, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, ramp
from gpuwatch.rulebook.waiting import (
    ADVICE,
    CORES,
    CROWD,
    EXPECTED,
    LONG_WAIT,
    MAKING_KEY,
    ON_TRAINING_THREAD,
    OWN_WORK,
    RECOMMENDED,
    SHARE,
    SHRINK,
    STEP,
    TO_WORKERS,
    WAIT,
    WAIT_SHARE,
    WORKERS,
    bursts,
    waits,
)

ITEMS_PART = LOADER_PART_SECONDS.where(part="items")
COLLATE_PART = LOADER_PART_SECONDS.where(part="collate")
COLLATE_SHARE = COLLATE_PART / (ITEMS_PART + COLLATE_PART)

# Waits for a core are left out on both sides: others on the machine have no part in what loading waits for. But where
# they are nearly all there is, the rest says nothing.
MORE_BLOCKED = WORKER_BLOCKED / WORKER_CPU >= 1.0
# The training thread's waits for a core are known of all phases together: it was asleep for at least so long.
OWN_SECONDS_A_CPU_SECOND = (PHASE_SECONDS.where(phase="data") - CPU_WAIT_SECONDS) / (LOADER_BATCH_CPU_SECONDS * BATCHES)
# Without workers, loading that takes little longer than the rest of the step is hidden by one of them, or two.
TOO_LONG_FOR_ONE_WORKER = WAIT_SHARE >= 0.65
BLOCKED_ALONE = LOADER_WORKERS.equals(0) & (OWN_SECONDS_A_CPU_SECOND >= 2.0) & TOO_LONG_FOR_ONE_WORKER
BLOCKED = ((WORKER_BLOCKED >= 0.2) & MORE_BLOCKED) | BLOCKED_ALONE


def _parts(items: float, collate: float, batch: float = 32) -> dict[str, tuple[float, ...]]:
    return {
        series_key(LOADER_PART_SECONDS.name, {"part": "items"}): flat(items),
        series_key(LOADER_PART_SECONDS.name, {"part": "collate"}): flat(collate),
        series_key(LOADER_PART_SECONDS.name, {"part": "copy"}): flat(0.5),
        LOADER_BATCH.name: flat(batch),
    }


def stalled(
    count: float, blocked: float, needed: float, cores: float = 8, starved: float = 0.02, running: float = 0.5
) -> dict[str, tuple[float, ...]]:
    """A stalled run: workers, the share of their work that they are blocked, the cores it all needs and has.

    ``starved`` is the share of their time that they have no core, ``running`` that of their work that they have one.
    """
    return {
        **waits(0.030, 1 / 3, count),
        WORKER_BLOCKED.name: flat(blocked),
        LOADER_NEEDED_CORES.name: flat(needed),
        CPU_BUDGET.name: flat(cores),
        WORKER_CPU_WAIT.name: flat(starved),
        WORKER_BUSY.name: flat(0.9),
        WORKER_CPU.name: flat(running),
    }


def _alone(cpu: float, waited: float, workers: float = 0, share: float = 0.75) -> dict[str, tuple[float, ...]]:
    """The training thread makes batches of 250 ms; CPU seconds of each, seconds a minute without core."""
    return {
        **waits(0.250, share, workers),
        BATCHES.name: ramp(240 * share),
        LOADER_BATCH_CPU_SECONDS.name: flat(cpu),
        CPU_WAIT_SECONDS.name: ramp(waited),
        MAKING_KEY: flat(0.250),
    }


RULES = (
    Rule(
        id="data-collate-slow",
        title="Putting the items of a batch together takes longer than loading them",
        severity="warn",
        scope="rank",
        # Stacking thousands of small tensors takes its time too, and is as fast as it gets.
        when=(LONG_WAIT & (COLLATE_SHARE >= 0.5))
        .unless(COLLATE_PART / LOADER_BATCH < 50e-6)
        .unless(ON_TRAINING_THREAD),
        hold_minutes=2,
        value=Quantity("collate", COLLATE_SHARE, "ratio"),
        quantities=(
            SHARE,
            WAIT,
            STEP,
            Quantity("putting", COLLATE_PART, "seconds"),
            Quantity("loading", ITEMS_PART, "seconds"),
            Quantity("items", LOADER_BATCH, "count"),
            *RECOMMENDED,
        ),
        because=(
            "Training waits for data, and at least half of the time to make a batch is spent in `collate_fn`, not in "
            "the data set. A loop over items or their elements in Python is the usual reason."
        ),
        evidence="`collate_fn` takes {putting} of a batch, its items {loading}: {collate} of the time to make it; "
        "{share} of step time is spent waiting",
        fix="Put whole items together in one call (`torch.stack`, `torch.nn.utils.rnn.pad_sequence`), keep tensors "
        "instead of lists in the data set, or do the work of an item in `__getitem__`.",
        clauses=ADVICE,
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check='`gpuwatch_loader_batch_part_seconds{part="collate"}` falls below that of the items.',
        suppresses=(
            "data-stall",
            "data-workers-zero",
            "data-cpu-bound",
            "data-io-bound",
            "data-not-cached",
            "comp-step-jitter",
        ),
        techniques=("T01",),
        examples=(
            Example("a loop over elements", {**waits(), **_parts(0.001, 0.024)}, True),
            Example(
                "a loop over elements, in workers that hand over together", {**bursts(), **_parts(0.001, 0.040)}, True
            ),
            Example("slow items", {**waits(), **_parts(0.022, 0.003)}, False),
            Example("a loop over elements, and a crowd", {**waits(), **_parts(0.001, 0.024), **CROWD}, False),
            Example(
                "a loop over elements, in the shade of a slow sampler",
                {**waits(), **_parts(0.001, 0.010), **OWN_WORK},
                False,
            ),
            Example("thousands of small tensors", {**waits(0.008), **_parts(0.005, 0.012, 2048)}, False),
            Example(
                "a loop over elements, hidden by workers", {**waits(0.001, 0.02), **_parts(0.001, 0.024)}, False
            ),
        ),
    ),
    Rule(
        id="data-io-bound",
        title="Loading waits for storage or a network",
        severity="warn",
        scope="rank",
        when=(LONG_WAIT & BLOCKED).unless(ON_TRAINING_THREAD),
        hold_minutes=2,
        value=SHARE,
        quantities=(
            WAIT,
            STEP,
            EXPECTED,
            WORKERS,
            Quantity("blocked", WORKER_BLOCKED, "ratio"),
            Quantity("cpu", LOADER_BATCH_CPU_SECONDS, "seconds"),
            *RECOMMENDED,
        ),
        because=(
            "Training waits for data, and what makes the batches is asleep for longer than it computes: it waits for a "
            "disk, a network, a server or a lock. Waits for a core are left out."
        ),
        evidence="{share} of step time is spent waiting: {wait} of {step} (medians); by what batches cost, a step has "
        "to wait {expected} on average; a batch takes {making} to make "
        "and {cpu} of CPU time; {workers} workers are blocked for {blocked} of the time they make batches",
        fix="Hide the latency with more workers or reads of several items at once (`__getitems__`), and make fewer, "
        "larger reads: shards or one memory-mapped file instead of a file an item, a copy on a local disk, a cache. "
        "Measure one of them first: on a warm local disk packing gains nothing.",
        clauses=TO_WORKERS,
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check="`gpuwatch_loader_worker_blocked_ratio` or the time to make a batch falls; so does the wait.",
        suppresses=("data-stall", "comp-step-jitter"),
        techniques=("T03", "T01"),
        examples=(
            Example("a file server", stalled(4, 0.9, 0.5, running=0.08), True),
            Example(
                "a file server whose answers come together",
                {
                    **stalled(4, 0.9, 0.5, running=0.08),
                    **bursts(),
                },
                True,
            ),
            Example("a file server, on a crowded machine", stalled(4, 0.3, 0.5, starved=0.6, running=0.03), True),
            Example(
                "a file server that keeps up, and a crowd", {**stalled(4, 0.9, 0.5, running=0.08), **CROWD}, False
            ),
            Example("a file server, read by the training thread", _alone(0.020, 1.0), True),
            Example("a file server that one worker would hide", _alone(0.020, 1.0, share=0.5), False),
            Example(
                "a sampler that sorts on the training thread",
                {**_alone(0.020, 1.0), **OWN_WORK},
                False,
            ),
            Example("decoding on the training thread", _alone(0.220, 1.0), False),
            Example("decoding on a training thread without a core", _alone(0.100, 10.0), False),
            Example("workers that decode", stalled(4, 0.4, 3, running=0.55), False),
            Example("a crowd, and little else", stalled(4, 0.08, 3, starved=0.85, running=0.04), False),
            Example("workers that decode, asked about the training thread", _alone(0.020, 1.0, 2), False),
            Example(
                "a file server, hidden by workers",
                {**stalled(8, 0.9, 0.5, running=0.08), **waits(0.001, 0.02)},
                False,
            ),
        ),
    ),
    Rule(
        id="data-cpu-bound",
        title="Loading needs more CPU than there is",
        severity="warn",
        scope="rank",
        when=(LONG_WAIT & (LOADER_WORKERS > 0) & (LOADER_NEEDED_CORES / CPU_BUDGET >= 1.0)).unless(MORE_BLOCKED)
        .unless(ON_TRAINING_THREAD),
        hold_minutes=2,
        value=SHARE,
        quantities=(
            WAIT,
            STEP,
            EXPECTED,
            WORKERS,
            CORES,
            Quantity("needed", LOADER_NEEDED_CORES, "count"),
            Quantity("cpu", LOADER_BATCH_CPU_SECONDS, "seconds"),
            *RECOMMENDED,
        ),
        because=(
            "Training waits for data, and the CPU time that training and its batches take is more than the cores of "
            "this rank can give in the time of a step. CPU time is counted, not load: other programs on the machine "
            "have no part in it. More workers would not help."
        ),
        evidence="{share} of step time is spent waiting: {wait} of {step} (medians); by what batches cost, a step has "
        "to wait {expected} on average; to keep up, training and "
        "{workers} workers would need {needed} cores; this rank may use {cores}; a batch takes {cpu} of CPU time",
        fix="Do less per item: decode and resize once and store the result, move augmentation to the device "
        "(`torchvision.transforms.v2` on batches, DALI), use a faster decoder; or give the run more cores.",
        clauses=(SHRINK,),
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check="`gpuwatch_loader_needed_cores` falls below the cores there are.",
        suppresses=("data-stall", "comp-step-jitter"),
        techniques=("T04", "T03"),
        examples=(
            Example("decoding on every core", stalled(8, 0.05, 13), True),
            Example("decoding that keeps up, and a crowd", {**stalled(8, 0.05, 13), **CROWD}, False),
            Example("decoding of batches that come together", {**stalled(8, 0.05, 13), **bursts(workers=8)}, True),
            Example("a file server, and much to decode", stalled(8, 0.8, 13, running=0.15), False),
            Example(
                "decoding on every core, in the shade of a slow sampler",
                {**stalled(8, 0.05, 13), **OWN_WORK},
                False,
            ),
            Example("too few workers for the cores there are", stalled(2, 0.05, 5), False),
            Example("no workers at all", {**stalled(0, 0.05, 13)}, False),
            Example(
                "enough cores, other programs on them",
                stalled(8, 0.05, 6, starved=0.5),
                False,
            ),
            Example(
                "every core in use, and no wait",
                {**waits(0.001, 0.02, 8), LOADER_NEEDED_CORES.name: flat(9), CPU_BUDGET.name: flat(8)},
                False,
            ),
        ),
    ),
)  # fmt: skip
