"""What a rule is: one record per failure mode, from which alerts, advice, panels and pages are rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuwatch.catalog import OBSERVATION, SCOPES
from gpuwatch.expr import (
    BinOp,
    Condition,
    Const,
    Expr,
    History,
    Observed,
    Peered,
    Quantity,
    by_rank,
    of_place,
    of_run,
    places_of,
    series_key,
)

SEVERITIES = ("info", "warn", "critical")

MINUTE = 60.0


@dataclass(frozen=True)
class Example:
    """A short history on which the rule must fire, or must stay quiet.

    ``series`` maps a series key to its values, one a minute, oldest first; of a rule on several ranks the keys carry
    ``rank`` (see :func:`of_ranks`). The same example is run through the advisor and through promtool. ``severity`` is
    the most serious one that must fire; None means the rule's own.
    """

    name: str
    series: Mapping[str, Sequence[float]]
    fires: bool
    severity: str | None = None

    def history(self) -> History:
        """The example as samples, a minute apart."""
        return {
            key: [(MINUTE * index, float(value)) for index, value in enumerate(values)]
            for key, values in self.series.items()
        }


@dataclass(frozen=True)
class Gain:
    """The most that following the advice can bring, from this run's own numbers.

    ``removable`` is the share of step time that could go away at best: a share s bounds the speed-up by 1 / (1 - s)
    (Amdahl). Without one, ``text`` says what is gained instead.
    """

    text: str
    removable: Expr | None = None

    def bound(self, history: History) -> float | None:
        """Largest possible speed-up as a factor, or None when it cannot be told."""
        share = None if self.removable is None else self.removable.value(history)
        if share is None or not 0 <= share < 1:
            return None
        return 1 / (1 - share)


@dataclass(frozen=True)
class Clause:
    """A sentence that a fix gets only where this run's numbers allow it: all that it names are known, ``when`` holds.

    An alert has no numbers to fill in and leaves it out.
    """

    text: str
    when: Condition | None = None


@dataclass(frozen=True)
class Rule:
    """One failure mode.

    ``when`` fires it at ``severity``; ``critical_when``, where given, raises it to critical. ``hold_minutes`` is how
    long Prometheus waits before it alerts. ``value`` is the number shown with it. ``evidence`` may name ``quantities``
    in braces (a part behind a semicolon is left out where it names one that is not known), and so may ``clauses``,
    which are added to ``fix``. ``advice`` is what to do by case: a finding has the first whose condition holds in place
    of ``fix``. ``suppresses`` names the rules that are mere consequences of this one.
    """

    id: str
    title: str
    severity: str
    scope: str
    when: Condition
    value: Quantity
    because: str
    evidence: str
    fix: str
    gain: Gain
    check: str
    examples: tuple[Example, ...]
    critical_when: Condition | None = None
    hold_minutes: int = 0
    quantities: tuple[Quantity, ...] = ()
    suppresses: tuple[str, ...] = ()
    techniques: tuple[str, ...] = ()
    clauses: tuple[Clause, ...] = ()
    notes: str = ""
    advice: tuple[tuple[Condition, str], ...] = ()
    observed: bool = field(default=False)

    @property
    def across(self) -> bool:
        """Whether it reads several ranks of a run."""
        return self.scope in ("peer", "run")

    @property
    def place(self) -> str:
        """The label that says where it was seen, beside its owner; empty where there is none."""
        value = self.value.expr.grouping() or ()
        own = [label for label in value if label not in ("instance", *self.owner_labels)]
        return "where" if self.observed else next(iter(own), "")

    @property
    def matched_by(self) -> tuple[str, ...]:
        """The labels that tell its alerts apart, those of the place left out."""
        return self.owner_labels if self.scope == "run" else ("instance", *self.owner_labels)

    def views(self, history: History) -> dict[tuple[str, str], History]:
        """The history by rank and place, as the conditions read it; both are empty where they make no difference."""
        if not self.across or isinstance(history, Peered):
            ranks = {"": history}
        elif self.scope == "run":
            ranks = {"": of_run(history)}
        else:
            peers = by_rank(history)
            shared: dict[object, Any] = {}
            ranks = {rank: Peered(own, list(peers.values()), shared) for rank, own in peers.items()}
        label = self.place
        if self.observed or not label:
            return {(rank, ""): view for rank, view in ranks.items()}
        return {
            (rank, place): of_place(view, label, place)
            for rank, view in ranks.items()
            for place in places_of(view, label)
        }

    @property
    def alert(self) -> str:
        """Name of its alert: ``data-stall`` is ``GpuwatchDataStall``."""
        return "Gpuwatch" + "".join(part.title() for part in self.id.split("-"))

    @property
    def owner_labels(self) -> tuple[str, ...]:
        """The labels that say whose reading it is."""
        return SCOPES[self.scope]


def observed(rule: str) -> Expr:
    """The magnitude of what a hook observed for this rule."""
    return Observed(OBSERVATION, rule)


def observation(rule: str, where: str = "train.py:41") -> str:
    """The series key of an observation, for examples."""
    return series_key(OBSERVATION.name, {"rule": rule, "where": where})


def of_ranks(*ranks: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """The series of an example by rank, rank 0 first, as one."""
    found: dict[str, Sequence[float]] = {}
    for rank, series in enumerate(ranks):
        for key, values in series.items():
            name, _, rest = key.partition("{")
            labels = f"{rest.removesuffix('}')}," if rest else ""
            found[f'{name}{{{labels}rank="{rank}"}}'] = values
    return found


def one_minus(share: Expr) -> Expr:
    """1 - share."""
    return BinOp("-", Const(1.0), share)


def flat(value: float, minutes: int = 10) -> tuple[float, ...]:
    """A reading that does not move."""
    return (value,) * (minutes + 1)


def ramp(per_minute: float, minutes: int = 10) -> tuple[float, ...]:
    """A counter that grows steadily."""
    return tuple(per_minute * minute for minute in range(minutes + 1))
