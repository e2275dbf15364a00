"""The README's table of rules."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwatch.render.runbooks import RUNBOOKS
from gpuwatch.rulebook import Rule

BEGIN = "<!-- rules:begin -->"
END = "<!-- rules:end -->"


def rule_table(rules: Iterable[Rule]) -> str:
    """One line a rule: its id, linked to its runbook (which has the advice), what it says, how serious it is."""
    lines = ["| rule | what it says | severity |", "|---|---|---|"]
    for rule in rules:
        severity = rule.severity if rule.critical_when is None else f"{rule.severity}, critical"
        cells = (f"[`{rule.id}`]({RUNBOOKS}{rule.id}.md)", rule.title, severity)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, rules: Iterable[Rule]) -> str:
    """The README with its table of rules renewed; unchanged where the two markers are not there."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        return readme
    return f"{before}{BEGIN}\n{rule_table(rules)}{END}{after}"
