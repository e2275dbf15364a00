"""Two runs side by side on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpuwatch.report.comparison import UNKNOWN, Comparison, Named, Pair
from gpuwatch.report.terminal import STYLES, heading
from gpuwatch.report.wording import printable, said

_SAME = 0.005
"""Changes below this share are not worth a number."""


def rendered(comparison: Comparison, encoding: str = "utf-8") -> RenderableType:
    """The comparison as something rich prints."""
    parts: list[RenderableType] = [
        heading(f"gpuwatch: {comparison['before']} -> {comparison['after']}", encoding),
        Text(_verdict(comparison)),
        Text(),
        Padding(_numbers(comparison), (0, 0, 0, 2)),
    ]
    if comparison["settings"]:
        parts += [Text(), Text("Set up differently", "bold"), Padding(_settings(comparison), (0, 0, 0, 2))]
    for title, name in (("New findings", "new"), ("Findings that are gone", "gone"), ("In both", "kept")):
        found: list[Named] = comparison["findings"][name]  # type: ignore[literal-required]
        if found:
            parts += [Text(), Text(title, "bold"), Padding(_findings(found), (0, 0, 0, 2))]
    parts.append(Text())
    if comparison["regressions"]:
        parts.append(Text("Regressions", "bold red"))
        parts += [Padding(Text(printable(sentence)), (0, 0, 0, 2)) for sentence in comparison["regressions"]]
    elif comparison["not_compared"]:
        parts.append(Text("No regression in what can be compared.", "bold"))
    else:
        parts.append(Text("No regression.", "bold"))
    return Group(*parts)


def _verdict(comparison: Comparison) -> str:
    step = comparison["step_seconds"]
    if comparison["same_run"]:
        return "Both are the same run: what differs is chance."
    if step["verdict"] == UNKNOWN or step["ratio"] is None or step["interval"] is None:
        return "\n".join(
            printable(f"Not compared: {reason}.") for reason in comparison["not_compared"] or ["step time"]
        )
    low, high = step["interval"]
    return (
        f"Step time: {step['verdict']}; median {said(step['before'], 'seconds')} -> {said(step['after'], 'seconds')}, "
        f"{step['ratio']:.3f} times, 95 % interval {low:.3f} to {high:.3f}"
    )


def _numbers(comparison: Comparison) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    for phase, pair in comparison["phase_seconds"].items():
        _row(table, f"{phase}, a step", pair, "seconds")
    _row(table, "share waiting for data", comparison["wait_share"], "ratio")
    _row(table, "host peak", comparison["host_peak_bytes"], "bytes")
    _row(table, "device peak", comparison["device_peak_bytes"], "bytes")
    return table


def _row(table: Table, name: str, pair: Pair, unit: str) -> None:
    before, after = pair["before"], pair["after"]
    if before is None and after is None:
        return
    table.add_row(name, said(before, unit), said(after, unit), _change(before, after, unit))


def _change(before: float | None, after: float | None, unit: str) -> str:
    if before is None or after is None:
        return ""
    if unit == "ratio":
        return f"{100 * (after - before):+.1f} points"
    if not before:
        return ""
    return "" if abs(after / before - 1) < _SAME else f"{100 * (after / before - 1):+.1f} %"


def _settings(comparison: Comparison) -> Table:
    table = Table.grid(padding=(0, 2))
    for setting in comparison["settings"]:
        one, other = setting["before"] or "not known", setting["after"] or "not known"
        table.add_row(setting["name"], printable(one), "->", printable(other))
    return table


def _findings(found: list[Named]) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in found:
        table.add_row(
            Text(finding["severity"].upper(), STYLES[finding["severity"]]),
            Text(printable(finding["summary"])),
            Text(finding["rule"], "dim"),
        )
    return table
