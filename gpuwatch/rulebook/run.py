"""Runs that stopped without saying so."""

from __future__ import annotations

from gpuwatch.catalog import (
    RANK_BUSY,
    RANK_ENDED,
    RANK_GONE_TIME,
    RANK_LAST_STEP,
    RANK_POSITION,
    RANK_PROGRESS_AGE,
    RANK_UP,
    WINDOW_STEP_SECONDS,
)
from gpuwatch.expr import Across, Quantity, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, of_ranks

_P99 = WINDOW_STEP_SECONDS.where(quantile="0.99")
_LAST = Quantity("step", RANK_LAST_STEP, "count")
_AFTER_THE_FIRST = RANK_GONE_TIME - Across("min", RANK_GONE_TIME)

# A run of several ranks stops as one: those that wait in a collective, and the one that never entered it. That one is
# furthest behind, and may have ended, with fewer batches than the others.
_SILENT = Across("min", RANK_PROGRESS_AGE)
_FURTHEST = Across("max", RANK_POSITION)
# It may be at work on something that no hook sees, for a while: stuck processes take a hundredth of a core, if that.
_AT_WORK = (Across("max", RANK_BUSY) >= 0.1) & (_SILENT < 3600)
_LAST_OF_ALL = Across("min", RANK_POSITION) >= RANK_POSITION


def _gone(at: float, up: float = 0, ended: float = 0) -> dict[str, tuple[float, ...]]:
    """A rank that was last seen at this time; one that lives, or has ended, is not gone."""
    gone = {} if up or ended else {RANK_GONE_TIME.name: flat(at)}
    return {RANK_UP.name: flat(up), RANK_ENDED.name: flat(ended), RANK_LAST_STEP.name: flat(841), **gone}


def _silent(
    position: float, age: float = 400, p99: float = 0.4, busy: float | None = None
) -> dict[str, tuple[float, ...]]:
    """A living rank that is so far, and of which nothing was seen for so long."""
    quantiles = {
        series_key(WINDOW_STEP_SECONDS.name, {"quantile": name}): flat(seconds)
        for name, seconds in (("0.5", p99 / 2), ("0.99", p99))
    }
    return {
        RANK_PROGRESS_AGE.name: flat(age),
        RANK_POSITION.name: flat(position),
        RANK_ENDED.name: flat(0),
        **({} if busy is None else {RANK_BUSY.name: flat(busy)}),
        **quantiles,
    }


def _over(position: float) -> dict[str, tuple[float, ...]]:
    """A rank that has ended after so many steps."""
    return {RANK_POSITION.name: flat(position), RANK_ENDED.name: flat(1)}


def _no_quantiles(series: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """The rank without step times: too few steps to speak of them."""
    return {key: values for key, values in series.items() if not key.startswith(WINDOW_STEP_SECONDS.name)}


RULES = (
    Rule(
        id="run-dead",
        title="The training process is gone without an end mark",
        severity="critical",
        scope="peer",
        # The first to go: those that its end takes with it (a launcher stops the others) go after it.
        when=_AFTER_THE_FIRST <= 0.05,
        value=Quantity("after", _AFTER_THE_FIRST, "seconds"),
        quantities=(
            _LAST,
            Quantity("seen", RANK_GONE_TIME, "timestamp"),
            Quantity("gone", Across("count", RANK_GONE_TIME), "count"),
        ),
        because=(
            "A run that ends, by an exception too, marks its record. This one did not: it was killed (out of host "
            "memory, SIGKILL, the scheduler) or crashed in native code. The kernel counts its out-of-memory kills, for "
            "the process's control group and for the machine: the evidence says what was counted since the last "
            "reading. No count is raised by a signal from somebody else, or by a crash."
        ),
        evidence="the process is gone, last seen at {seen}; its last completed step is {step}; "
        "{gone} of the run's ranks are gone",
        fix="Where the kernel counted an out-of-memory kill: more host memory for the job, fewer loader workers, a "
        "smaller prefetch. Else look at the scheduler's log, for who sent a signal, and for a core dump. Resume from "
        "the last checkpoint.",
        gain=Gain("the run"),
        check="The run makes steps again.",
        suppresses=("run-hang", "data-stall", "data-workers-zero", "comp-step-jitter"),
        examples=(
            Example("killed", of_ranks(_gone(10)), True),
            Example("one of two killed, the other stopped for it", of_ranks(_gone(12), _gone(10)), True),
            Example("ended", of_ranks(_gone(10, ended=1)), False),
            Example("running", of_ranks(_gone(10, up=1), _gone(10, up=1)), False),
        ),
    ),
    Rule(
        id="run-hang",
        title="The run makes no progress",
        severity="critical",
        scope="peer",
        when=(_LAST_OF_ALL & (_SILENT >= 300)).unless(Across("max", _P99) * 10 > _SILENT).unless(_AT_WORK),
        value=Quantity("age", RANK_POSITION * 0 + _SILENT, "seconds"),  # of the run, at each of its ranks
        quantities=(
            _LAST,
            Quantity("behind", _FURTHEST - RANK_POSITION, "count"),
            Quantity("ended", Across("sum", RANK_ENDED), "count"),
        ),
        because=(
            "No batch, forward, backward or optimizer step was seen on any rank for at least five minutes and ten "
            "times the 99th percentile of a step, and the processes still hold their records: a collective that a peer "
            "never entered, a deadlock, a dead worker, storage that does not answer. Of several ranks the one that is "
            "furthest behind is named, in steps and within a step: the others wait for it. It may have ended before "
            "them. Where they cannot be told apart, all are. Where a rank keeps a tenth of a core busy, or waits for "
            "one, all the while (a long tokenization, a compilation), nothing is said for an hour."
        ),
        evidence="nothing has happened for {age}; this rank has completed {step} steps and is {behind} steps behind "
        "the furthest one; {ended} ranks of the run have ended",
        fix="Take this rank's stack: `py-spy dump --pid PID` (or `faulthandler`). Where it waits in a collective as "
        "the others do, compare what each of them enters: NCCL's flight recorder (`TORCH_FR_BUFFER_SIZE`, "
        "`TORCH_NCCL_DUMP_ON_TIMEOUT=1`) names the collective that a rank never entered. A rank that has ended had "
        "fewer batches: `ddp.join()`, or a sampler that gives all the same number.",
        gain=Gain("the run"),
        check="The age of the last progress falls to a step's length.",
        suppresses=("data-stall", "comp-step-jitter"),
        notes="Every step of a rank among several tells what it last did: asked for a batch, got it, began a backward, "
        "ended it, stepped. Of those that did the same last, the one that sleeps, runs or was stopped is behind those "
        "whose main thread waits for another thread, as in a collective on the CPU; the kernel tells, and the report "
        "says it.",
        examples=(
            Example("stuck", of_ranks(_silent(841.4)), True),
            Example(
                "one of three never entered its backward",
                of_ranks(_silent(841.43), _silent(841.33), _silent(841.43)),
                True,
            ),
            Example("one of two had fewer batches", of_ranks(_silent(841.43), _over(841.02)), True),
            Example("stuck before the hundredth step", of_ranks(_no_quantiles(_silent(7.5))), True),
            Example("one of two still computes", of_ranks(_silent(841.3), _silent(841.3, age=40)), False),
            Example(
                "slow steps, and one rank silent for longer",
                of_ranks(_silent(12.4, 320, 50), _silent(12.3, 900, 50)),
                False,
            ),
            Example("slow steps", of_ranks(_silent(12.3, p99=90), _silent(12.3)), False),
            Example(
                "one of two is at work on something of its own",
                of_ranks(_silent(841.3, busy=0.9), _silent(841.4, 3700, busy=0.001)),
                False,
            ),
            Example("little CPU time", of_ranks(_silent(841.3, busy=0.09), _silent(841.3, busy=0.001)), True),
            Example("at work for longer than an hour", of_ranks(_silent(841.3, 3700, busy=1.0)), True),
            Example("all have ended", of_ranks(_over(841.02), _over(841.02)), False),
        ),
    ),
)
