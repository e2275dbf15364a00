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
    Rule(
        id="opt-recreated",
        title="The optimizer is built again and again, and its state is lost each time",
        severity="warn",
        scope="rank",
        when=observed("opt-recreated") >= 3,
        value=Quantity("times", observed("opt-recreated"), "count"),
        because=(
            "A new optimizer took over parameters whose last one is gone, and began with an empty state: momentum and "
            "moments start from zero, and Adam's first steps are as large as its learning rate allows. One that takes "
            "over the old state, and one without any (plain SGD), are not counted."
        ),
        evidence="{times} times an optimizer was replaced by a fresh one for the same parameters",
        fix="Build the optimizer once, before the loop; change `param_groups[...]['lr']`, or use a scheduler, and "
        "`add_param_group` for layers that join later.",
        gain=Gain("correctness: momentum and moments over the whole run"),
        check="The optimizer's `state` is kept across epochs.",
        techniques=("T16",),
        observed=True,
        examples=(
            Example("at every epoch", {observation("opt-recreated", "Adam"): flat(9)}, True),
            Example("once, for the second phase", {observation("opt-recreated", "Adam"): flat(1)}, False),
        ),
    ),
    Rule(
        id="opt-unused-grads",
        title="Gradients are computed that no optimizer uses",
        severity="info",
        scope="rank",
        when=observed("opt-unused-grads") >= 1024,
        value=Quantity("unused", observed("opt-unused-grads"), "bytes"),
        because=(
            "Parameters that require a gradient and got one belong to no optimizer that has stepped so far: a trunk "
            "that is meant to be frozen. Backward goes through it, and its gradients stay and add up."
        ),
        evidence="{unused} of gradients belong to parameters of no optimizer",
        fix="Call `requires_grad_(False)` on the part that is not trained, or run it under `torch.no_grad()`; if it "
        "is to be trained, give it to the optimizer.",
        gain=Gain("the backward through that part, its gradients and its saved activations"),
        check="`parameter.grad is None` for parameters of no optimizer.",
        techniques=("T17",),
        observed=True,
        examples=(
            Example("a trunk that nobody trains", {observation("opt-unused-grads", "trunk"): flat(90 << 20)}, True),
            Example("a scale", {observation("opt-unused-grads", "scale"): flat(4)}, False),
        ),
    ),
)
