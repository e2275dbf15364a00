"""What Alertmanager is told of the rules: which alerts are consequences of others, so that one cause pages once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuwatch.render.document import OneLine, document
from gpuwatch.rulebook import Rule

_COMMENT = """
Alerts are grouped by run and kind: one message, whatever the number of ranks. Put your receiver (e-mail, chat, a
webhook) under `team`; `quiet` is for what can wait until somebody looks at the dashboard.
The inhibitions are the rulebook's: while the source fires, its consequences on the same rank or GPU are muted; a rank
that died, hangs or lags behind mutes them in its whole run."""


def alertmanager_config(rules: Iterable[Rule]) -> str:
    """A whole configuration: routes by severity, receivers to fill in, an inhibition per rule with consequences."""
    body = {
        "route": {
            "receiver": "team",
            "group_by": ["run", "alertname"],
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": "4h",
            "routes": [{"receiver": "quiet", "matchers": ['severity="info"']}],
        },
        "receivers": [{"name": "team"}, {"name": "quiet"}],
        "inhibit_rules": inhibitions(rules),
    }
    return document(body, _COMMENT)


def inhibitions(rules: Iterable[Rule]) -> list[Mapping[str, object]]:
    """Alertmanager's inhibition rules: one per rule and set of labels that its consequences share with it."""
    rules = tuple(rules)
    known = {rule.id: rule for rule in rules}
    found: list[Mapping[str, object]] = []
    for rule in rules:
        by_labels: dict[tuple[str, ...], list[str]] = {}
        for consequence in rule.suppresses:
            if consequence in known:
                by_labels.setdefault(shared_labels(rule, known[consequence]), []).append(consequence)
        for labels, muted in by_labels.items():
            found.append(
                OneLine(
                    source_matchers=[f'rule="{rule.id}"'],
                    target_matchers=[f'rule=~"{"|".join(muted)}"'],
                    equal=list(labels),
                )
            )
    return found


def shared_labels(cause: Rule, consequence: Rule) -> tuple[str, ...]:
    """The labels that must be equal for one alert to explain another.

    A rank that is set beside its peers stands for its run: when one has died, the others hang. A run is the same on
    every node, so ``instance`` takes no part where both alerts name a run. GPUs are numbered anew on every node, and
    where nothing else is shared the node is what the two have in common.
    """
    shared = tuple(label for label in cause.owner_labels if label in consequence.owner_labels)
    if "run" not in shared:
        return ("instance", *shared)
    return ("run",) if cause.scope == "peer" else shared
