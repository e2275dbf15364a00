"""Time that goes elsewhere: slow steps, the interpreter, number formats."""

from __future__ import annotations

from gpuwatch.catalog import (
    CPU_WAIT_SECONDS,
    GC_ENABLED,
    GC_LONGEST,
    GC_PAUSE_SECONDS,
    GC_PAUSES,
    PHASE_SECONDS,
    STEPS,
    WINDOW_JITTER_RATIO,
    WINDOW_SLOW_EXCESS_SECONDS,
    WINDOW_SLOW_RATIO,
    WINDOW_STEP_SECONDS,
)
from gpuwatch.expr import Const, Quantity, Rate, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed, one_minus, ramp
from gpuwatch.rulebook.waiting import STEP_RATE

_MEDIAN_STEP = WINDOW_STEP_SECONDS.where(quantile="0.5")
_MEDIAN_KEY = series_key(WINDOW_STEP_SECONDS.name, {"quantile": "0.5"})
# The share of time that slow steps cost is 1 - median / mean. Where the thread waited for a core for half of that or
# more, the machine is crowded: true, but no fault of the program.
_EXPLAINED = one_minus(Const(1) / WINDOW_JITTER_RATIO) * 0.5
_CROWDED = CPU_WAIT_SECONDS / PHASE_SECONDS >= _EXPLAINED

# Automatic collection off (0, else 1), and one by hand in five steps or more: what this rule recommends.
_SCHEDULED = GC_ENABLED + GC_PAUSES / STEPS <= 0.2
_GC_SHARE = Rate(GC_PAUSE_SECONDS) / STEP_RATE


def _loop(seconds: float) -> dict[str, tuple[float, ...]]:
    """Phase counters of a run that spends these seconds of every minute in training steps."""
    return {
        series_key(PHASE_SECONDS.name, {"phase": "forward"}): ramp(seconds * 0.4),
        series_key(PHASE_SECONDS.name, {"phase": "backward"}): ramp(seconds * 0.6),
    }


RULES = (
    Rule(
        id="comp-step-jitter",
        title="Some steps are far slower than the others",
        severity="warn",
        scope="rank",
        # The floor of 20 ms keeps the scheduler's noise on a busy machine out: it comes in a few milliseconds.
        when=(
            (WINDOW_SLOW_RATIO >= 0.05) & (WINDOW_SLOW_EXCESS_SECONDS >= 0.02) & (WINDOW_JITTER_RATIO >= 1.1)
        ).unless(_CROWDED),
        hold_minutes=5,
        value=Quantity("share", WINDOW_SLOW_RATIO, "ratio"),
        quantities=(
            Quantity("excess", WINDOW_SLOW_EXCESS_SECONDS, "seconds"),
            Quantity("step", _MEDIAN_STEP, "seconds"),
        ),
        because=(
            "Outliers are steps beyond the median plus six scaled median absolute deviations (and 1.5 medians); steps "
            "with an evaluation, an epoch's first batch or a larger batch are left out."
        ),
        evidence="{share} of steps take {excess} longer than the median of {step}",
        fix="Look at what the slow steps have in common: the report names the phase that grows. Checkpoints and "
        "logging belong off the training thread; input of uneven cost needs more prefetch.",
        gain=Gain("all steps as fast as the median one", removable=one_minus(Const(1) / WINDOW_JITTER_RATIO)),
        check="The 95th percentile of the step time comes down to the median.",
        examples=(
            Example(
                "every tenth step",
                {
                    WINDOW_SLOW_RATIO.name: flat(0.1), WINDOW_SLOW_EXCESS_SECONDS.name: flat(0.2),
                    WINDOW_JITTER_RATIO.name: flat(1.4), _MEDIAN_KEY: flat(0.05),
                },
                True,
            ),
            Example(
                "a machine shared by too many processes",
                {
                    WINDOW_SLOW_RATIO.name: flat(0.1), WINDOW_SLOW_EXCESS_SECONDS.name: flat(0.05),
                    WINDOW_JITTER_RATIO.name: flat(1.25), CPU_WAIT_SECONDS.name: ramp(9),
                    series_key(PHASE_SECONDS.name, {"phase": "forward"}): ramp(58),
                },
                False,
            ),
            Example(
                "a scheduler's hiccups",
                {
                    WINDOW_SLOW_RATIO.name: flat(0.08), WINDOW_SLOW_EXCESS_SECONDS.name: flat(0.004),
                    WINDOW_JITTER_RATIO.name: flat(1.3),
                },
                False,
            ),
            Example(
                "one slow step in a thousand",
                {
                    WINDOW_SLOW_RATIO.name: flat(0.001), WINDOW_SLOW_EXCESS_SECONDS.name: flat(3),
                    WINDOW_JITTER_RATIO.name: flat(1.02),
                },
                False,
            ),
        ),
    ),
    Rule(
        id="comp-gc-pause",
        title="Python's garbage collector stops the loop",
        severity="warn",
        scope="rank",
        # Five pauses: a few are normal while a program starts, and a short run must not be judged by one.
        when=(
            ((GC_PAUSES >= 5) & (_GC_SHARE >= 0.02)) | ((GC_PAUSES >= 3) & (GC_LONGEST >= 0.1) & (_GC_SHARE >= 0.01))
        ).unless(_SCHEDULED),
        value=Quantity("share", _GC_SHARE, "ratio"),
        quantities=(Quantity("pauses", GC_PAUSES, "count"), Quantity("longest", GC_LONGEST, "seconds")),
        because=(
            "A full collection walks every object of the process with the interpreter stopped. Called in the loop, or "
            "triggered by many live objects, it stops training; on several ranks each waits for the slowest."
        ),
        evidence="{pauses} full collections took {share} of training time, the longest {longest}",
        fix="Remove `gc.collect()` from the loop; after set-up call `gc.collect(); gc.freeze()`, or collect on a "
        "schedule of your own at the same step on all ranks.",
        gain=Gain("the pauses", removable=_GC_SHARE),
        check="The collector's share falls below 1 %.",
        techniques=("T24",),
        examples=(
            Example(
                "collecting at every step",
                {GC_PAUSES.name: ramp(600), GC_PAUSE_SECONDS.name: ramp(30), GC_LONGEST.name: flat(0.08),
                 **_loop(55)},
                True,
            ),
            Example(
                "long automatic pauses",
                {GC_PAUSES.name: ramp(4), GC_PAUSE_SECONDS.name: ramp(0.9), GC_LONGEST.name: flat(0.3),
                 **_loop(58)},
                True,
            ),
            Example(
                "automatic collection off, one by hand every ten steps",
                {GC_PAUSES.name: ramp(60), GC_PAUSE_SECONDS.name: ramp(9), GC_LONGEST.name: flat(0.18),
                 GC_ENABLED.name: flat(0), STEPS.name: ramp(600), **_loop(40)},
                False,
            ),
            Example(
                "automatic collection off, one by hand at every step",
                {GC_PAUSES.name: ramp(600), GC_PAUSE_SECONDS.name: ramp(30), GC_LONGEST.name: flat(0.08),
                 GC_ENABLED.name: flat(0), STEPS.name: ramp(600), **_loop(55)},
                True,
            ),
            Example(
                "a pause while starting",
                {GC_PAUSES.name: flat(1), GC_PAUSE_SECONDS.name: flat(0.2), GC_LONGEST.name: flat(0.2),
                 **_loop(58)},
                False,
            ),
            Example(
                "collections while no step is made",
                {GC_PAUSES.name: ramp(4), GC_PAUSE_SECONDS.name: ramp(0.9), GC_LONGEST.name: flat(0.3), **_loop(0)},
                False,
            ),
            Example(
                "a healthy loop",
                {GC_PAUSES.name: ramp(2), GC_PAUSE_SECONDS.name: ramp(0.06), GC_LONGEST.name: flat(0.03),
                 **_loop(58)},
                False,
            ),
        ),
    ),
    Rule(
        id="comp-float64",
        title="The model computes in float64",
        severity="warn",
        scope="rank",
        when=observed("comp-float64") >= 0.5,
        value=Quantity("share", observed("comp-float64"), "ratio"),
        because=(
            "float64 doubles every byte, and most accelerators compute it at a small fraction of their float32 speed. "
            "It usually comes in through numpy's default dtype and a `.double()` that silenced the error. A program "
            "that set the default dtype to float64 chose it, and is not reported."
        ),
        evidence="{share} of parameters are float64 while the default dtype is float32",
        fix="Cast at the data set (`torch.from_numpy(x).float()`) and drop `.double()` on the model.",
        gain=Gain("half the memory of parameters, gradients, optimizer state and activations"),
        check="`next(model.parameters()).dtype` is torch.float32.",
        techniques=("T12",),
        observed=True,
        examples=(
            Example("all of it", {observation("comp-float64"): flat(1.0)}, True),
            Example("one small buffer's worth", {observation("comp-float64"): flat(0.01)}, False),
        ),
    ),
)  # fmt: skip
