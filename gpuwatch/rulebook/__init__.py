"""The rulebook: every failure mode as one record. Alerts, advice, panels and pages are rendered from it."""

from __future__ import annotations

from gpuwatch.rulebook import (
    capacity,
    compute,
    data,
    debug,
    evaluation,
    fragmentation,
    growth,
    hardware,
    memory,
    modules,
    optimizer,
    run,
)
from gpuwatch.rulebook.rule import Example, Gain, Rule

__all__ = ["RULES", "RULES_BY_ID", "Example", "Gain", "Rule"]

RULES: tuple[Rule, ...] = (
    *run.RULES,
    *memory.RULES,
    *capacity.RULES,
    *fragmentation.RULES,
    *growth.RULES,
    *modules.RULES,
    *data.RULES,
    *evaluation.RULES,
    *debug.RULES,
    *optimizer.RULES,
    *compute.RULES,
    *hardware.RULES,
)
"""Every rule, most urgent kinds first."""

RULES_BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
"""The same, by id."""
