"""Threads of the training process: too many or too few for an operator, and Python threads that take turns with it."""

from __future__ import annotations

from gpuwatch.catalog import (
    CPU_BUDGET,
    DEVICE_CAPACITY,
    LOADER_NEEDED_CORES,
    LOCAL_RANKS,
    OTHER_THREAD_CORES,
    TORCH_THREADS,
    WINDOW_STEP_SECONDS,
)
from gpuwatch.expr import Quantity, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed
from gpuwatch.rulebook.waiting import CORES, MEDIAN_STEP, MEDIAN_STEP_KEY

_THREADS = Quantity("threads", TORCH_THREADS, "count")
TOO_MANY = TORCH_THREADS / CPU_BUDGET >= 2
# One thread is right for small tensors: only long steps on many idle cores are worth a word.
TOO_FEW = (TORCH_THREADS / CPU_BUDGET <= 0.25) & (MEDIAN_STEP >= 0.05)
# With a device the operators on the CPU hardly matter, unless the batches need the cores.
ON_DEVICE = DEVICE_CAPACITY > 0
SHORT_OF_CORES = LOADER_NEEDED_CORES / CPU_BUDGET >= 1


def _threads(
    threads: float, cores: float, step: float = 0.2, device: float = 0, needed: float | None = None
) -> dict[str, tuple[float, ...]]:
    known = {
        TORCH_THREADS.name: flat(threads),
        CPU_BUDGET.name: flat(cores),
        LOCAL_RANKS.name: flat(1),
        MEDIAN_STEP_KEY: flat(step),
        series_key(WINDOW_STEP_SECONDS.name, {"quantile": "0.99"}): flat(step + 0.1),
    }
    if device:
        known[DEVICE_CAPACITY.name] = flat(device)
    if needed is not None:
        known[LOADER_NEEDED_CORES.name] = flat(needed)
    return known


RULES = (
    Rule(
        id="env-omp-threads",
        title="torch's threads do not fit the cores of this rank",
        severity="info",
        scope="rank",
        when=(TOO_MANY | TOO_FEW).unless(ON_DEVICE) | (TOO_MANY & SHORT_OF_CORES),
        hold_minutes=2,
        value=Quantity("ratio", TORCH_THREADS / CPU_BUDGET, "1"),
        quantities=(_THREADS, CORES, Quantity("ranks", LOCAL_RANKS, "count")),
        because=(
            "An operator on the CPU is divided among `torch.get_num_threads()` threads. Twice as many as cores (each "
            "rank has its own) wait for each other at the end of every operator; a quarter of the cores leaves the "
            "rest idle in long steps. Counted are the cores of this rank: its affinity and cgroup quota, over the "
            "ranks of the node."
        ),
        evidence="torch uses {threads} threads in each of {ranks} rank(s) on this node; a rank may use {cores} cores",
        fix="Set `OMP_NUM_THREADS` (before the start; `torchrun` sets it to 1), or call `torch.set_num_threads()`, to "
        "the cores of a rank.",
        gain=Gain("operators on the CPU that wait for no thread, or use the cores there are"),
        check="`gpuwatch_torch_threads` is about `gpuwatch_cpu_budget_cores`; the step time falls.",
        techniques=("T01",),
        examples=(
            Example("eight ranks with the threads of all cores", _threads(64, 8), True),
            Example("one thread on a machine of its own", _threads(1, 32), True),
            Example("one thread on a machine of its own, tiny steps", _threads(1, 32, 0.002), False),
            Example("the default", _threads(16, 16), False),
            Example("the default with hyper-threads", _threads(8, 16), False),
            Example("one thread on a GPU", _threads(1, 32, device=80 << 30), False),
            Example("many threads on a GPU", _threads(64, 8, device=80 << 30), False),
            Example("many threads on a GPU that wants for data", _threads(18, 8, device=80 << 30, needed=11), True),
            Example("many threads on a GPU that is fed", _threads(64, 8, device=80 << 30, needed=3), False),
            Example("few threads on a GPU that wants for data", _threads(8, 8, device=80 << 30, needed=11), False),
        ),
    ),
    Rule(
        id="comp-gil-contention",
        title="Another Python thread holds up the training thread",
        severity="warn",
        scope="rank",
        when=observed("comp-gil-contention") >= 0.5,
        value=Quantity("share", observed("comp-gil-contention"), "ratio"),
        quantities=(Quantity("all", OTHER_THREAD_CORES, "count"),),
        because=(
            "Only one thread of a process runs Python at a time. A thread that computes makes the training thread wait "
            "for its turn, up to 5 ms (`sys.getswitchinterval()`) at every operator. A thread that sleeps, or that "
            "computes in a library with the interpreter let go, does not; torch's own threads are not counted."
        ),
        evidence="it computes for {share} of the time (waits for a core left out); all Python threads but the training "
        "thread keep {all} cores busy",
        fix="Move its work to a process (`multiprocessing`, a DataLoader worker), or into calls that let the "
        "interpreter go; let it wait (`queue.get()`, `Event.wait()`) instead of asking again and again.",
        gain=Gain("operators that start when they are called"),
        check="`gpuwatch_other_python_thread_cores` falls below 0.5; the step time falls.",
        suppresses=("data-stall", "data-workers-zero", "data-io-bound", "comp-step-jitter"),
        observed=True,
        examples=(
            Example(
                "a thread that computes",
                {observation("comp-gil-contention", "train.py:12 (poll)"): flat(0.9), OTHER_THREAD_CORES.name: flat(1)},
                True,
            ),
            Example(
                "a thread that logs now and then",
                {observation("comp-gil-contention", "train.py:12 (log)"): flat(0.02),
                 OTHER_THREAD_CORES.name: flat(0.02)},
                False,
            ),
        ),
    ),
)  # fmt: skip
