"""Runs that stopped without saying so."""

from __future__ import annotations

from gpuwatch.catalog import RANK_ENDED, RANK_LAST_STEP, RANK_PROGRESS_AGE, RANK_UP, WINDOW_STEP_SECONDS
from gpuwatch.expr import Quantity, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, ramp

_P99 = WINDOW_STEP_SECONDS.where(quantile="0.99")
_P99_KEY = series_key(WINDOW_STEP_SECONDS.name, {"quantile": "0.99"})
_LAST = Quantity("step", RANK_LAST_STEP, "count")

RULES = (
    Rule(
        id="run-dead",
        title="The training process is gone without an end mark",
        severity="critical",
        scope="rank",
        when=RANK_UP.equals(0) & RANK_ENDED.equals(0),
        value=Quantity("up", RANK_UP, "count"),
        quantities=(_LAST, Quantity("age", RANK_PROGRESS_AGE, "seconds")),
        because=(
            "A run that ends, by an exception too, marks its record. This one did not: it was killed (out of host "
            "memory, SIGKILL, the scheduler) or crashed in native code. The kernel counts its out-of-memory kills, for "
            "the process's control group and for the machine: the evidence says what was counted since the last "
            "reading. No count is raised by a signal from somebody else, or by a crash."
        ),
        evidence="the process is gone; its last completed step is {step}",
        fix="Where the kernel counted an out-of-memory kill: more host memory for the job, fewer loader workers, a "
        "smaller prefetch. Else look at the scheduler's log, for who sent a signal, and for a core dump. Resume from "
        "the last checkpoint.",
        gain=Gain("the run"),
        check="The run makes steps again.",
        suppresses=("run-hang", "data-stall", "data-workers-zero", "comp-step-jitter"),
        examples=(
            Example("killed", {RANK_UP.name: flat(0), RANK_ENDED.name: flat(0), RANK_LAST_STEP.name: flat(841)}, True),
            Example("ended", {RANK_UP.name: flat(0), RANK_ENDED.name: flat(1)}, False),
            Example("running", {RANK_UP.name: flat(1), RANK_ENDED.name: flat(0)}, False),
        ),
    ),
    Rule(
        id="run-hang",
        title="The process lives but makes no progress",
        severity="critical",
        scope="rank",
        when=(RANK_PROGRESS_AGE >= 300) & (RANK_PROGRESS_AGE >= _P99 * 10) & RANK_UP.equals(1),
        value=Quantity("age", RANK_PROGRESS_AGE, "seconds"),
        quantities=(_LAST, Quantity("p99", _P99, "seconds")),
        because=(
            "No batch, forward, backward or optimizer step was seen for at least five minutes and ten times the 99th "
            "percentile of a step, and the process still holds its record: a collective that a peer never entered, a "
            "deadlock, a dead worker, storage that does not answer."
        ),
        evidence="nothing has happened for {age}; the 99th percentile of a step is {p99}, the last step {step}",
        fix="Take the stack: `py-spy dump --pid PID` (or `faulthandler`), on the rank that lags behind first.",
        gain=Gain("the run"),
        check="The age of the last progress falls to a step's length.",
        suppresses=("data-stall", "comp-step-jitter"),
        examples=(
            Example(
                "stuck",
                {RANK_PROGRESS_AGE.name: ramp(60, 12), _P99_KEY: flat(0.4, 12), RANK_UP.name: flat(1, 12)},
                True,
            ),
            Example(
                "slow steps",
                {RANK_PROGRESS_AGE.name: flat(320), _P99_KEY: flat(90), RANK_UP.name: flat(1)},
                False,
            ),
            Example(
                "ended long ago",
                {RANK_PROGRESS_AGE.name: flat(9000), _P99_KEY: flat(0.4), RANK_UP.name: flat(0)},
                False,
            ),
        ),
    ),
)
