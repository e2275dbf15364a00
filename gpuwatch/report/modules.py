"""A run's memory by module: from the rows of a record to a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuwatch.expr import series_key
from gpuwatch.layout import MODULE_ROW
from gpuwatch.reader import Snapshot
from gpuwatch.report.shape import ModulePart
from gpuwatch.report.wording import printable, said

SHOWN = 12
"""Lines of the table in a report for people; the JSON has all."""

HEADINGS = ("module", "how many", "parameters", "gradients", "optimizer", "saved for backward", "saved so far")


def modules_of(snapshot: Snapshot) -> list[ModulePart]:
    """Memory of a rank by module, the largest first; empty when it was not measured."""
    found: dict[str, dict[str, float]] = {}
    for name, labels in snapshot.series:
        if name == MODULE_ROW and {"module", "part"} <= labels.keys():
            number = snapshot.values.get(series_key(name, labels))
            if number is not None and number >= 0:
                found.setdefault(labels["module"], {})[labels["part"]] = number
    return sorted((_part(name, row) for name, row in found.items()), key=size_of, reverse=True)


def size_of(part: ModulePart) -> int:
    """All bytes of a module."""
    return part["parameters_bytes"] + part["gradients_bytes"] + part["optimizer_bytes"] + part["activations_bytes"]


def lines(parts: Sequence[ModulePart]) -> list[tuple[str, ...]]:
    """The table as text, a line a module; what does not fit is summed in the last line."""
    shown = [_line(printable(part["module"]), part) for part in parts[:SHOWN]]
    rest = sum(size_of(part) for part in parts[SHOWN:])
    if rest:
        shown.append((f"{len(parts) - SHOWN} more: {said(rest, 'bytes')}", *[""] * (len(HEADINGS) - 1)))
    return shown


def _part(name: str, row: Mapping[str, float]) -> ModulePart:
    def whole(part: str) -> int:
        return round(row.get(part, 0))

    return {
        "module": name,
        "modules": whole("count"),
        "parameters_bytes": whole("parameters"),
        "gradients_bytes": whole("gradients"),
        "optimizer_bytes": whole("optimizer"),
        "activations_bytes": whole("activations"),
        "reached_bytes": whole("reached"),
    }


def _line(name: str, part: ModulePart) -> tuple[str, ...]:
    sizes = (
        part["parameters_bytes"],
        part["gradients_bytes"],
        part["optimizer_bytes"],
        part["activations_bytes"],
        part["reached_bytes"],
    )
    return (name, str(part["modules"]), *(said(size, "bytes") if size else "" for size in sizes))
