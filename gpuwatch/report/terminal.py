"""A run on a terminal: what ran, where its time and memory went, what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from gpuwatch.report.data import HEADINGS as WORKER_HEADINGS
from gpuwatch.report.data import data_lines
from gpuwatch.report.data import lines as worker_lines
from gpuwatch.report.modules import HEADINGS, lines
from gpuwatch.report.shape import DataPart, Document, MemoryPart, RunPart, TimePart
from gpuwatch.report.wording import (
    NOT_KNOWN,
    beside_line,
    counted,
    facts_line,
    memory_lines,
    no_findings,
    printable,
    ranks_of,
    said,
    speed_line,
    state_line,
)

BAR_CELLS = 30
STYLES = {"critical": "bold red", "warn": "bold yellow", "info": "bold cyan"}
_STATE_STYLES = {"killed": "red", "exception": "red", "running": "green"}
_PHASE_STYLES = {"data": "red", "forward": "green", "backward": "blue", "optimizer": "magenta", "other": "white"}


def show(content: RenderableType) -> None:
    """Print to standard output, in colour on a terminal only. Raises BrokenPipeError when nobody reads any more."""
    console = Console(markup=False, emoji=False)  # `[/]` in the name of a run is no style of ours
    with console.capture() as captured:  # rich would end the process on a broken pipe, in a way of its own
        console.print(content)
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().split("\n")))
    sys.stdout.flush()


def heading(text: str, encoding: str = "utf-8") -> Rule:
    """A line across the terminal that begins with this text."""
    return Rule(Text(printable(text), "bold"), align="left", characters="─" if _wide(encoding) else "-")


def rendered(report: Document, encoding: str = "utf-8") -> RenderableType:
    """The report as something rich prints; ``encoding`` is the terminal's, for the bars."""
    run, findings = report["run"], report["findings"]
    wide = _wide(encoding)
    parts: list[RenderableType] = [
        heading(f"gpuwatch: {run['name']}", encoding),
        *_identity(run),
        Text(),
        *_time(report["time"], wide),
        Text(),
        *_memory(report["memory"]),
    ]
    if report["memory"]["modules"]:
        parts += [Text(), Padding(_table(HEADINGS, lines(report["memory"]["modules"])), (0, 0, 0, 2))]
    parts += _data(report["data"])
    if len(run["ranks"]) > 1:
        parts += [Text(), _ranks(run)]
    parts.append(Text())
    if not findings:
        parts.append(Text(no_findings(report), "bold"))
    else:
        parts.append(Text(counted(len(findings), "finding"), "bold"))
    for number, finding in enumerate(findings, 1):
        parts += [Text(), *_finding(number, finding, len(run["ranks"]))]
    return Group(*parts)


def _wide(encoding: str) -> bool:
    return encoding.lower().replace("-", "") in ("utf8", "utf16", "utf32")


def _identity(run: RunPart) -> Iterator[Text]:
    yield Text(state_line(run), _STATE_STYLES.get(run["state"], ""))
    yield Text(facts_line(run), "dim")


def _time(time: TimePart, wide: bool) -> Iterator[RenderableType]:
    yield Text.assemble(("Time    ", "bold"), speed_line(time))
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(justify="right")
    for phase, spent in time["phases"].items():
        share = spent["share"]
        if share is None:
            table.add_row(phase, "", "", Text(NOT_KNOWN, "dim"))
            continue
        bar = ("█" if wide else "#") * round(BAR_CELLS * share)
        table.add_row(
            phase,
            Text(bar.ljust(BAR_CELLS, "·" if wide else "."), _PHASE_STYLES[phase]),
            said(share, "ratio"),
            said(spent["seconds"], "seconds"),
        )
    yield Padding(table, (0, 0, 0, 2))
    beside = beside_line(time)
    if beside:
        yield Padding(Text(beside, "dim"), (0, 0, 0, 2))


def _memory(memory: MemoryPart) -> Iterator[RenderableType]:
    first, *rest = memory_lines(memory) or [NOT_KNOWN]
    yield Text.assemble(("Memory  ", "bold"), first)
    for line in rest:
        yield Padding(Text(line), (0, 0, 0, 8))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, heading_text in enumerate(headings):
        # Folded and not cut off: `layers.…` would name any of them.
        table.add_column(heading_text, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _data(data: DataPart) -> Iterator[RenderableType]:
    known = data_lines(data)
    if not known:
        return
    yield Text()
    yield Text.assemble(("Data    ", "bold"), known[0])
    for line in known[1:]:
        yield Padding(Text(line), (0, 0, 0, 8))
    if data["worker_table"]:
        yield Text()
        yield Padding(_table(WORKER_HEADINGS, worker_lines(data["worker_table"])), (0, 0, 0, 2))


def _ranks(run: RunPart) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rank")
    table.add_column("state")
    for name in ("steps", "median step", "data wait", "host peak", "device peak"):
        table.add_column(name, justify="right")
    for rank in run["ranks"]:
        table.add_row(
            str(rank["rank"]),
            Text(rank["state"], _STATE_STYLES.get(rank["state"], "")),
            f"{rank['steps']:,}",
            said(rank["step_seconds"]["p50"], "seconds"),
            said(rank["data_share"], "ratio"),
            said(rank["host_peak_bytes"], "bytes"),
            said(rank["device_active_peak_bytes"], "bytes"),
        )
    return table


def _finding(number: int, finding: Mapping[str, object], world: int) -> Iterator[RenderableType]:
    severity = str(finding["severity"])
    yield Text.assemble(
        f"{number}. ",
        (severity.upper(), STYLES[severity]),
        "  ",
        (printable(str(finding["summary"])), "bold"),
        (f"  {finding['rule']}", "dim"),
    )
    yield Padding(Text(printable(str(finding["evidence"]))), (0, 0, 0, 3))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name in ("where", "fix", "gain", "check"):
        if finding[name]:
            table.add_row(name, Text(printable(str(finding[name]))))
    ranks = ranks_of(finding, world)
    if ranks:
        table.add_row("who", ranks)
    yield Padding(table, (0, 0, 0, 3))
