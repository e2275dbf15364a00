"""What the worker processes go through: too many of them, deaths, and shared memory that fills up."""

from __future__ import annotations

from gpuwatch.catalog import (
    CPU_BUDGET,
    LOADER_BATCH_BYTES,
    LOADER_PREFETCH,
    LOADER_WORKERS,
    SHARED_MEMORY_TOTAL,
    SHARED_MEMORY_USED,
    WORKER_BLOCKED,
    WORKER_BUSY,
    WORKER_CPU,
    WORKER_DEATHS,
)
from gpuwatch.expr import Quantity
from gpuwatch.rulebook.making import stalled
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed, one_minus
from gpuwatch.rulebook.waiting import (
    ADVICE,
    CORES,
    RECOMMENDED,
    SHARE,
    WAIT_SHARE,
    WORKERS,
    waits,
)

GIB = 1 << 30
MIB = 1 << 20

SHM_SHARE = SHARED_MEMORY_USED / SHARED_MEMORY_TOTAL
# Cores that the workers keep busy with making batches.
WORKERS_CORES = LOADER_WORKERS * WORKER_BUSY * WORKER_CPU
# Of the time they make batches, what they are ready but have no core.
NO_CORE = one_minus(WORKER_CPU + WORKER_BLOCKED)
UNDER_WAY = LOADER_WORKERS * LOADER_PREFETCH * LOADER_BATCH_BYTES


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
        suppresses=("data-stall", "comp-step-jitter"),
        techniques=("T01",),
        examples=(
            Example("sixteen workers on eight cores", stalled(16, 0.02, 6, starved=0.5, running=0.3), True),
            Example("sixteen workers that wait for storage", stalled(16, 0.66, 1, starved=0.04, running=0.3), False),
            Example("other programs on the cores of a few", stalled(7, 0.02, 6, starved=0.5, running=0.4), False),
            Example("other programs on the cores of many", stalled(16, 0.3, 1, starved=0.5, running=0.1), False),
            Example(
                "sixteen workers, and no wait",
                {**stalled(16, 0.02, 6, starved=0.5, running=0.3), **waits(0.001, 0.02)},
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
