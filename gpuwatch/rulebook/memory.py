"""Memory that is kept."""

from __future__ import annotations

from gpuwatch.expr import Quantity
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed

RULES = (
    Rule(
        id="leak-graph-retained",
        title="Autograd graphs of old steps are still referenced",
        severity="warn",
        scope="rank",
        when=observed("leak-graph-retained") >= 30,
        value=Quantity("graphs", observed("leak-graph-retained"), "count"),
        because=(
            "Something keeps a tensor that still carries its graph: a list of losses, a running sum, an output, a "
            "hidden state. The graph lives as long as the tensor does, with whatever it saved. Graphs of the last 50 "
            "steps are not counted, nor a buffer that is cleared again."
        ),
        evidence="the graphs of about {graphs} steps that ended more than 50 steps ago are still alive",
        fix="Keep numbers, not graphs: `.detach()` before you store (or `.item()` every N steps).",
        gain=Gain("memory stops growing with every step"),
        check="Memory in use at the same point of the step stays level.",
        techniques=("T17",),
        observed=True,
        examples=(
            Example("a list of losses", {observation("leak-graph-retained"): flat(200)}, True),
            Example("the last few outputs", {observation("leak-graph-retained"): flat(4)}, False),
        ),
    ),
)
