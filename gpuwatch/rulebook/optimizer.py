"""Gradients and optimizers."""

from __future__ import annotations

from gpuwatch.expr import Quantity
from gpuwatch.limits import KEPT_STEPS, ZEROED_STEPS
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed

RULES = (
    Rule(
        id="opt-zero-grad-inplace",
        title="Gradients are filled with zeros",
        severity="info",
        scope="rank",
        when=observed("opt-zero-grad-inplace") >= ZEROED_STEPS,
        value=Quantity("steps", observed("opt-zero-grad-inplace"), "count"),
        because=(
            "`zero_grad(set_to_none=False)` keeps every gradient allocated between steps and writes zeros into it, "
            "which backward then reads to add to them."
        ),
        evidence="gradients were kept and zeroed in place before {steps} checked steps in a row",
        fix="Call `optimizer.zero_grad()` without `set_to_none=False`: to None is the default since torch 2.0.",
        gain=Gain("one write and one read of every gradient, and their bytes between steps"),
        check="`parameter.grad is None` after `zero_grad()`.",
        techniques=("T07",),
        observed=True,
        examples=(
            Example("every step", {observation("opt-zero-grad-inplace"): flat(64)}, True),
            Example("at the start only", {observation("opt-zero-grad-inplace"): flat(4)}, False),
        ),
    ),
    Rule(
        id="opt-grads-not-zeroed",
        title="Gradients are never cleared between optimizer steps",
        severity="critical",
        scope="rank",
        when=observed("opt-grads-not-zeroed") >= KEPT_STEPS,
        value=Quantity("steps", observed("opt-grads-not-zeroed"), "count"),
        because=(
            "Each backward adds to the gradients of all earlier ones, so the optimizer follows a sum over the whole "
            "run. Accumulation over several backward passes per step is not this, and is not reported."
        ),
        evidence="the gradients of {steps} optimizer steps in a row still held the previous step's values at backward",
        fix="Call `optimizer.zero_grad()` once per optimizer step.",
        gain=Gain("correctness: the run does not train on the gradients of its batch"),
        check="`parameter.grad is None` (or zero) when backward starts.",
        techniques=("T07",),
        observed=True,
        examples=(
            Example("never", {observation("opt-grads-not-zeroed"): flat(200)}, True),
            Example("forgotten for a few steps", {observation("opt-grads-not-zeroed"): flat(6)}, False),
        ),
    ),
)
