"""The rulebook: every failure mode as one record. Alerts, advice, panels and pages are rendered from it."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwatch.rulebook import (
    capacity,
    compute,
    data,
    debug,
    devices,
    distributed,
    evaluation,
    fragmentation,
    growth,
    hardware,
    loaders,
    making,
    memory,
    modules,
    optimizer,
    regression,
    run,
    threads,
    transfer,
    workers,
)
from gpuwatch.rulebook.rule import Example, Gain, Rule

__all__ = ["RECORDS", "RULES", "RULES_BY_ID", "Example", "Gain", "Rule"]

RULES: tuple[Rule, ...] = (
    *run.RULES,
    *distributed.RULES,
    *devices.RULES,
    *regression.RULES,
    *memory.RULES,
    *capacity.RULES,
    *fragmentation.RULES,
    *growth.RULES,
    *modules.RULES,
    *data.RULES,
    *making.RULES,
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

RECORDS: Mapping[str, str] = regression.RECORDS
"""Series that Prometheus computes beside those that single rules ask for: name and expression."""

RULES_BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
"""The same, by id."""
