"""Debugging switches left on."""

from __future__ import annotations

from gpuwatch.catalog import PHASE_SECONDS
from gpuwatch.expr import Expr, Quantity, Rate
from gpuwatch.limits import SWITCH_STEPS
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed

_STEP = Rate(PHASE_SECONDS)
_AUTOGRAD_SHARE = (Rate(PHASE_SECONDS.where(phase="forward")) + Rate(PHASE_SECONDS.where(phase="backward"))) / _STEP


def _switch(
    id: str,
    title: str,
    because: str,
    evidence: str,
    fix: str,
    check: str,
    gain: str,
    removable: Expr | None = _AUTOGRAD_SHARE,
    notes: str = "",
    techniques: tuple[str, ...] = ("T11",),
) -> Rule:
    """A rule for a switch: what differs between them is text."""
    return Rule(
        id=id,
        title=title,
        severity="warn",
        scope="rank",
        when=observed(id) > SWITCH_STEPS,
        value=Quantity("steps", observed(id), "count"),
        because=because,
        evidence=evidence,
        fix=fix,
        gain=Gain(gain, removable=removable),
        check=check,
        techniques=techniques,
        notes=notes,
        observed=True,
        examples=(
            Example("on for the whole run", {observation(id): flat(400)}, True),
            Example("on for a few steps on purpose", {observation(id): flat(3)}, False),
        ),
    )


RULES = (
    _switch(
        "debug-anomaly",
        "Anomaly detection is on",
        "Anomaly mode records a Python traceback for every operation of the forward pass and checks every gradient "
        "for NaN. It is meant for finding one, not for training.",
        "anomaly detection has been on for {steps} training steps in a row",
        "Remove `torch.autograd.set_detect_anomaly(True)` (or the `detect_anomaly()` block) from the training loop.",
        "The forward and backward shares fall and steps per second rise.",
        "what anomaly mode adds to forward and backward; measure a minute with and without",
    ),
    _switch(
        "debug-profiler-on",
        "A profiler never stops recording",
        "An open profiler writes an event for every operation, keeps all of them in memory, and holds tensors alive "
        "with `record_shapes` or `profile_memory`.",
        "a profiler has been recording for {steps} training steps in a row",
        "Give the profiler a `schedule=torch.profiler.schedule(wait=…, warmup=…, active=3, repeat=1)`, and call "
        "`stop()`.",
        "Steps per second rise and host memory stops growing.",
        "what recording adds to each operation",
        techniques=("T11", "T29"),
    ),
    _switch(
        "debug-env-sync",
        "A debugging switch of the environment is on",
        "These variables make kernels synchronous, bypass the memory cache or check every collective: right for "
        "finding a fault, slow for anything else.",
        "set for {steps} training steps",
        "Unset the variable for real runs, or call `torch.cuda.set_sync_debug_mode(0)`.",
        "The variable is gone from the environment of the run and steps per second rise.",
        "the forced synchronisation",
        None,
    ),
    _switch(
        "debug-deterministic-fill",
        "Deterministic mode fills every new tensor",
        "With deterministic algorithms on, `torch.utils.deterministic.fill_uninitialized_memory` (True by default) "
        "also writes NaN or a maximum into every new tensor, which is rarely what was asked for.",
        "deterministic algorithms and the fill of uninitialised memory have both been on for {steps} training steps",
        "Set `torch.utils.deterministic.fill_uninitialized_memory = False`: results stay deterministic unless "
        "something reads memory it never wrote. Turn deterministic algorithms off where they are not needed.",
        "Steps per second rise; losses stay the same.",
        "the writes that the fill adds to forward and backward",
        notes="Deterministic algorithms alone are a choice, and are not reported.",
    ),
)
