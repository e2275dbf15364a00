"""Why making batches is slow, and what the worker processes go through."""

from __future__ import annotations

from gpuwatch.catalog import (
    BATCHES,
    CPU_BUDGET,
    CPU_WAIT_SECONDS,
    LOADER_BATCH,
    LOADER_BATCH_BYTES,
    LOADER_BATCH_CPU_SECONDS,
    LOADER_NEEDED_CORES,
    LOADER_PART_SECONDS,
    LOADER_PREFETCH,
    LOADER_WORKERS,
    PHASE_SECONDS,
    SHARED_MEMORY_TOTAL,
    SHARED_MEMORY_USED,
    WORKER_BLOCKED,
    WORKER_BUSY,
    WORKER_CPU,
    WORKER_CPU_WAIT,
    WORKER_DEATHS,
)
from gpuwatch.expr import Quantity, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed, one_minus, ramp
from gpuwatch.rulebook.waiting import (
    ADVICE,
    CORES,
    LONG_WAIT,
    MAKING_KEY,
    RECOMMENDED,
    SHARE,
    SHRINK,
    STEP,
    TO_WORKERS,
    WAIT,
    WAIT_SHARE,
    WORKERS,
    waits,
)

GIB = 1 << 30
MIB = 1 << 20

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

SHM_SHARE = SHARED_MEMORY_USED / SHARED_MEMORY_TOTAL
# Cores that the workers keep busy with making batches.
WORKERS_CORES = LOADER_WORKERS * WORKER_BUSY * WORKER_CPU
# Of the time they make batches, what they are ready but have no core.
NO_CORE = one_minus(WORKER_CPU + WORKER_BLOCKED)
UNDER_WAY = LOADER_WORKERS * LOADER_PREFETCH * LOADER_BATCH_BYTES


def _parts(items: float, collate: float, batch: float = 32) -> dict[str, tuple[float, ...]]:
    return {
        series_key(LOADER_PART_SECONDS.name, {"part": "items"}): flat(items),
        series_key(LOADER_PART_SECONDS.name, {"part": "collate"}): flat(collate),
        series_key(LOADER_PART_SECONDS.name, {"part": "copy"}): flat(0.5),
        LOADER_BATCH.name: flat(batch),
    }


def _workers(
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


def _shared(used: float, total: float, batch: float, workers: float = 8) -> dict[str, tuple[float, ...]]:
    return {
        SHARED_MEMORY_USED.name: flat(used),
        SHARED_MEMORY_TOTAL.name: flat(total),
        LOADER_WORKERS.name: flat(workers),
        LOADER_PREFETCH.name: flat(4),
        LOADER_BATCH_BYTES.name: flat(batch),
    }


RULES = (
    Rule(
        id="data-collate-slow",
        title="Putting the items of a batch together takes longer than loading them",
        severity="warn",
        scope="rank",
        # Stacking thousands of small tensors takes its time too, and is as fast as it gets.
        when=(LONG_WAIT & (COLLATE_SHARE >= 0.5)).unless(COLLATE_PART / LOADER_BATCH < 50e-6),
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
        suppresses=("data-stall", "data-workers-zero", "data-cpu-bound", "data-io-bound", "data-not-cached"),
        techniques=("T01",),
        examples=(
            Example("a loop over elements", {**waits(), **_parts(0.001, 0.024)}, True),
            Example("slow items", {**waits(), **_parts(0.022, 0.003)}, False),
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
        when=LONG_WAIT & BLOCKED,
        hold_minutes=2,
        value=SHARE,
        quantities=(
            WAIT,
            STEP,
            WORKERS,
            Quantity("blocked", WORKER_BLOCKED, "ratio"),
            Quantity("cpu", LOADER_BATCH_CPU_SECONDS, "seconds"),
            *RECOMMENDED,
        ),
        because=(
            "Training waits for data, and what makes the batches is asleep for longer than it computes: it waits for a "
            "disk, a network, a server or a lock. Waits for a core are left out."
        ),
        evidence="{share} of step time is spent waiting: {wait} of {step} (medians); a batch takes {making} to make "
        "and {cpu} of CPU time; {workers} workers are blocked for {blocked} of the time they make batches",
        fix="Hide the latency with more workers or reads of several items at once (`__getitems__`), and make fewer, "
        "larger reads: shards or one memory-mapped file instead of a file an item, a copy on a local disk, a cache. "
        "Measure one of them first: on a warm local disk packing gains nothing.",
        clauses=TO_WORKERS,
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check="`gpuwatch_loader_worker_blocked_ratio` or the time to make a batch falls; so does the wait.",
        suppresses=("data-stall",),
        techniques=("T03", "T01"),
        examples=(
            Example("a file server", _workers(4, 0.9, 0.5, running=0.08), True),
            Example("a file server, on a crowded machine", _workers(4, 0.3, 0.5, starved=0.6, running=0.03), True),
            Example("a file server, read by the training thread", _alone(0.020, 1.0), True),
            Example("a file server that one worker would hide", _alone(0.020, 1.0, share=0.5), False),
            Example("decoding on the training thread", _alone(0.220, 1.0), False),
            Example("decoding on a training thread without a core", _alone(0.100, 10.0), False),
            Example("workers that decode", _workers(4, 0.4, 3, running=0.55), False),
            Example("a crowd, and little else", _workers(4, 0.08, 3, starved=0.85, running=0.04), False),
            Example("workers that decode, asked about the training thread", _alone(0.020, 1.0, 2), False),
            Example(
                "a file server, hidden by workers",
                {**_workers(8, 0.9, 0.5, running=0.08), **waits(0.001, 0.02)},
                False,
            ),
        ),
    ),
    Rule(
        id="data-cpu-bound",
        title="Loading needs more CPU than there is",
        severity="warn",
        scope="rank",
        when=(LONG_WAIT & (LOADER_WORKERS > 0) & (LOADER_NEEDED_CORES / CPU_BUDGET >= 1.0)).unless(MORE_BLOCKED),
        hold_minutes=2,
        value=SHARE,
        quantities=(
            WAIT,
            STEP,
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
        evidence="{share} of step time is spent waiting: {wait} of {step} (medians); to keep up, training and "
        "{workers} workers would need {needed} cores; this rank may use {cores}; a batch takes {cpu} of CPU time",
        fix="Do less per item: decode and resize once and store the result, move augmentation to the device "
        "(`torchvision.transforms.v2` on batches, DALI), use a faster decoder; or give the run more cores.",
        clauses=(SHRINK,),
        gain=Gain("no step can gain more than its wait", removable=WAIT_SHARE),
        check="`gpuwatch_loader_needed_cores` falls below the cores there are.",
        suppresses=("data-stall",),
        techniques=("T04", "T03"),
        examples=(
            Example("decoding on every core", _workers(8, 0.05, 13), True),
            Example("a file server, and much to decode", _workers(8, 0.8, 13, running=0.15), False),
            Example("too few workers for the cores there are", _workers(2, 0.05, 5), False),
            Example("no workers at all", {**_workers(0, 0.05, 13)}, False),
            Example(
                "enough cores, other programs on them",
                _workers(8, 0.05, 6, starved=0.5),
                False,
            ),
            Example(
                "every core in use, and no wait",
                {**waits(0.001, 0.02, 8), LOADER_NEEDED_CORES.name: flat(9), CPU_BUDGET.name: flat(8)},
                False,
            ),
        ),
    ),
    Rule(
        id="data-workers-oversubscribed",
        title="More loader workers than cores, and they wait for one",
        severity="warn",
        scope="rank",
        # No floor for the wait: it comes in bursts, and that the workers use the cores themselves rules out a crowd.
        when=(WAIT_SHARE >= 0.10)
        & (LOADER_WORKERS / CPU_BUDGET > 1.0)
        & (NO_CORE >= 0.4)
        & (WORKERS_CORES / CPU_BUDGET >= 0.25),
        hold_minutes=2,
        value=Quantity("waiting", NO_CORE, "ratio"),
        quantities=(SHARE, WORKERS, CORES, Quantity("used", WORKERS_CORES, "count"), *RECOMMENDED),
        because=(
            "There are more workers than this rank has cores, and they spend much of their time ready to run but "
            "without a core: they take turns, and take the training thread's core too. Many workers that wait for "
            "storage are fine, and are not reported."
        ),
        evidence="{workers} workers share {cores} cores, use {used} of them and wait for one in {waiting} of the time "
        "they make batches; "
        "{share} of step time is spent waiting for them",
        fix="Lower `num_workers` to the cores this rank may use, less one for training.",
        clauses=ADVICE,
        gain=Gain("cores for the training thread, memory of the workers, shorter starts of an epoch"),
        check="`gpuwatch_loader_worker_cpu_wait_ratio` falls and the wait for data does not grow.",
        suppresses=("data-stall",),
        techniques=("T01",),
        examples=(
            Example("sixteen workers on eight cores", _workers(16, 0.02, 6, starved=0.5, running=0.3), True),
            Example("sixteen workers that wait for storage", _workers(16, 0.66, 1, starved=0.04, running=0.3), False),
            Example("other programs on the cores of a few", _workers(7, 0.02, 6, starved=0.5, running=0.4), False),
            Example("other programs on the cores of many", _workers(16, 0.3, 1, starved=0.5, running=0.1), False),
            Example(
                "sixteen workers, and no wait",
                {**_workers(16, 0.02, 6, starved=0.5, running=0.3), **waits(0.001, 0.02)},
                False,
            ),
        ),
    ),
    Rule(
        id="data-worker-died",
        title="A loader worker died",
        severity="critical",
        scope="rank",
        when=observed("data-worker-died") >= 0,
        value=Quantity("signal", observed("data-worker-died"), "count"),
        quantities=(
            Quantity("deaths", WORKER_DEATHS, "count"),
            Quantity("used", SHARED_MEMORY_USED, "bytes"),
            Quantity("total", SHARED_MEMORY_TOTAL, "bytes"),
        ),
        because=(
            "A worker process ended while its loader was in use. By signal 9 it is usually the kernel, for want of "
            "host memory; by 7 (SIGBUS) /dev/shm is full; by 11 (SIGSEGV) or 6 (SIGABRT) a library crashed, a decoder "
            "for example. 0 is an exit of the worker's own. Torch's error names the worker and no cause."
        ),
        evidence="{deaths} worker(s) died; {used} of {total} of /dev/shm were in use",
        fix="Signal 9: fewer workers, a smaller `prefetch_factor`, items in arrays instead of Python objects. Signal "
        "7: enlarge /dev/shm (`docker run --shm-size`, an `emptyDir` of medium Memory) or lower `prefetch_factor`. "
        "Others: find the item with `num_workers=0`, or set `PYTHONFAULTHANDLER=1`.",
        gain=Gain("the run"),
        check="`gpuwatch_loader_worker_deaths_total` stays as it is.",
        techniques=("T01",),
        observed=True,
        examples=(
            Example(
                "killed for its memory",
                {observation("data-worker-died", "worker 1"): flat(9), WORKER_DEATHS.name: flat(1)},
                True,
            ),
            Example(
                "an exit of its own",
                {observation("data-worker-died", "worker 1"): flat(0), WORKER_DEATHS.name: flat(1)},
                True,
            ),
            Example(
                "stopped by its loader",
                {observation("data-worker-died", "worker 1"): flat(-1), WORKER_DEATHS.name: flat(0)},
                False,
            ),
        ),
    ),
    Rule(
        id="data-shm-pressure",
        title="Batches under way fill the shared memory",
        severity="warn",
        scope="rank",
        # Others use /dev/shm as well: what this loader can have there must matter.
        when=(SHM_SHARE >= 0.5) & (UNDER_WAY / SHARED_MEMORY_TOTAL >= 0.25),
        critical_when=(SHM_SHARE >= 0.9) & (UNDER_WAY / SHARED_MEMORY_TOTAL >= 0.25),
        value=Quantity("share", SHM_SHARE, "ratio"),
        quantities=(
            Quantity("used", SHARED_MEMORY_USED, "bytes"),
            Quantity("total", SHARED_MEMORY_TOTAL, "bytes"),
            WORKERS,
            Quantity("prefetch", LOADER_PREFETCH, "count"),
            Quantity("batch", LOADER_BATCH_BYTES, "bytes"),
            Quantity("under_way", UNDER_WAY, "bytes"),
        ),
        because=(
            "Workers hand over batches in /dev/shm. When it is full the next batch ends the worker with a bus error. "
            "What is in use is read from the file system: torch removes the names of its segments at once, and "
            "listing them shows nothing."
        ),
        evidence="{used} of {total} of /dev/shm are in use; {workers} workers times {prefetch} batches of {batch} are "
        "up to {under_way}",
        fix="Lower `num_workers` or `prefetch_factor`, send smaller items (uint8 instead of float32, crops instead of "
        "whole images), or enlarge /dev/shm (`docker run --shm-size`, an `emptyDir` of medium Memory).",
        gain=Gain("no bus error when a batch is larger than the others"),
        check="`gpuwatch_shared_memory_used_bytes` stays below half of the size.",
        suppresses=(),
        techniques=("T01",),
        examples=(
            Example("a container's 64 MiB", _shared(40 * MIB, 64 * MIB, MIB), True),
            Example("a container's 64 MiB, to the brim", _shared(60 * MIB, 64 * MIB, MIB), True, severity="critical"),
            Example("half of the memory, as Linux gives it", _shared(GIB, 32 * GIB, 32 * MIB), False),
            Example("filled by another program", _shared(20 * GIB, 32 * GIB, 4 * MIB), False),
            Example("filled to the brim by another program", _shared(31 * GIB, 32 * GIB, 4 * MIB), False),
        ),
    ),
)  # fmt: skip
