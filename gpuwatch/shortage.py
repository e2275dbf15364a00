"""Who held the memory when it ran out: the largest modules, and what grew from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Set

from gpuwatch.expr import series_key
from gpuwatch.layout import MODULE_ROW
from gpuwatch.reader import Snapshot
from gpuwatch.sizes import size_text

MOST_MODULES = 3
MOST_HOLDERS = 3
_PARTS = frozenset({"parameters", "gradients", "optimizer", "activations"})


def held(snapshot: Snapshot, fired: Set[str]) -> str:
    """Both in words, for the rules in ``fired``; empty where neither is known."""
    return "; ".join((*_modules(snapshot), *_holders(snapshot, fired)))


def _modules(snapshot: Snapshot) -> Iterator[str]:
    """From the last measurement of the models' memory by module."""
    sizes: dict[str, float] = {}
    for name, labels in snapshot.series:
        if name == MODULE_ROW and "module" in labels and labels.get("part") in _PARTS:
            number = snapshot.values.get(series_key(name, labels))
            if number is not None and number > 0:
                sizes[labels["module"]] = sizes.get(labels["module"], 0.0) + number
    largest = sorted(sizes, key=lambda module: -sizes[module])[:MOST_MODULES]
    if largest:
        yield "largest modules: " + ", ".join(f"`{module}` {size_text(sizes[module])}" for module in largest)


def _holders(snapshot: Snapshot, fired: Set[str]) -> Iterator[str]:
    """From the findings of the leak probes: those that the rules bear out, the heaviest first."""
    seen = [place for place in snapshot.observations if place.rule.startswith("leak-") and place.rule in fired]
    named = sorted((place for place in seen if place.magnitude > 0), key=lambda place: -place.magnitude)
    if named:
        texts = [f"{place.where}: {place.evidence}" if place.where else place.evidence for place in named]
        yield "growing: " + "; ".join(texts[:MOST_HOLDERS])
