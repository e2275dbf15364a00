"""Evaluation inside training, and the training flag."""

from __future__ import annotations

from gpuwatch.catalog import EVALUATION_FORWARDS, OBSERVATION
from gpuwatch.expr import Quantity
from gpuwatch.limits import EVAL_MODE_STEPS
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed

_WASTED_SHARE = OBSERVATION.where(rule="eval-grad-enabled") / EVALUATION_FORWARDS

RULES = (
    Rule(
        id="eval-grad-enabled",
        title="Validation builds autograd graphs",
        severity="warn",
        scope="rank",
        when=(observed("eval-grad-enabled") >= 8) & (_WASTED_SHARE >= 0.9),
        value=Quantity("forwards", observed("eval-grad-enabled"), "count"),
        quantities=(Quantity("share", _WASTED_SHARE, "ratio"),),
        because=(
            "`model.eval()` does not stop autograd: each forward saves its activations for a backward that never "
            "comes, and an output that is kept pins them. Forwards in eval mode that do get a backward (frozen "
            "statistics, saliency) are not counted."
        ),
        evidence="{forwards} forward passes in eval mode ({share} of all evaluation forwards) ran with gradients "
        "enabled and got no backward",
        fix="Put the evaluation under `with torch.inference_mode():` (or `torch.no_grad()`).",
        gain=Gain("the activations of an evaluation batch, and the time to save them"),
        check="`output.requires_grad` is False in the evaluation.",
        techniques=("T05",),
        observed=True,
        examples=(
            Example(
                "a validation without no_grad",
                {observation("eval-grad-enabled"): flat(40), EVALUATION_FORWARDS.name: flat(40)},
                True,
            ),
            Example(
                "one forgotten call among many",
                {observation("eval-grad-enabled"): flat(10), EVALUATION_FORWARDS.name: flat(400)},
                False,
            ),
            Example(
                "a short validation",
                {observation("eval-grad-enabled"): flat(8), EVALUATION_FORWARDS.name: flat(8)},
                True,
            ),
            Example(
                "a validation of seven batches, too few to speak of",
                {observation("eval-grad-enabled"): flat(7), EVALUATION_FORWARDS.name: flat(7)},
                False,
            ),
            Example(
                "two forwards to log a picture",
                {observation("eval-grad-enabled"): flat(2), EVALUATION_FORWARDS.name: flat(2)},
                False,
            ),
        ),
    ),
    Rule(
        id="state-eval-mode",
        title="Training goes on in eval mode after a validation",
        severity="warn",
        scope="rank",
        when=observed("state-eval-mode") >= EVAL_MODE_STEPS,
        value=Quantity("steps", observed("state-eval-mode"), "count"),
        because=(
            "The model trained in train mode, an evaluation switched it to eval mode, and nothing switched it back: "
            "dropout is off and batch norm no longer follows the data. A model that was in eval mode from the start "
            "is a choice, and is not reported."
        ),
        evidence="{steps} optimizer steps since the evaluation that left the model in eval mode",
        fix="Call `model.train()` after the evaluation, or at the start of every epoch.",
        gain=Gain("correctness: the model trains as it was built to"),
        check="`model.training` is True at every training step.",
        observed=True,
        examples=(
            Example("left behind", {observation("state-eval-mode"): flat(300)}, True),
            Example("a few steps only", {observation("state-eval-mode"): flat(5)}, False),
        ),
    ),
)
