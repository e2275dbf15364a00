"""The ids of all rules as a file of their own, for who only needs to know whether there is such a rule."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwatch.rulebook import Rule

_HEAD = '''"""The ids of the rulebook's rules. Written by `make render`.

The daemon lets no other through, and does not load 1 MB of rules to know them.
"""

from __future__ import annotations

RULE_IDS = frozenset(
    {
'''


def rule_ids(rules: Iterable[Rule]) -> str:
    """A module with the ids of these rules."""
    return _HEAD + "".join(f'        "{rule.id}",\n' for rule in rules) + "    }\n)\n"
