"""The rulebook: every failure mode as one record. Alerts, advice, panels and pages are rendered from it."""

from __future__ import annotations

from gpuwatch.rulebook import (
    capacity,
    compute,
    data,
    debug,
    distributed,
    evaluation,
    fragmentation,
    growth,
    hardware,
    loaders,
    memory,
    modules,
    optimizer,
    run,
    threads,
    transfer,
    workers,
)
from gpuwatch.rulebook.rule import Example, Gain, Rule

__all__ = ["RULES", "RULES_BY_ID", "Example", "Gain", "Rule"]

RULES: tuple[Rule, ...] = (
    *run.RULES,
    *distributed.RULES,
    *memory.RULES,
    *capacity.RULES,
    *fragmentation.RULES,
    *growth.RULES,
    *modules.RULES,
    *data.RULES,
    *workers.RULES,
    *loaders.RULES,
    *transfer.RULES,
    *threads.RULES,
    *evaluation.RULES,
    *debug.RULES,
    *optimizer.RULES,
    *compute.RULES,
    *hardware.RULES,
)
"""Every rule, most urgent kinds first."""

RULES_BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
"""The same, by id."""
