"""A run as one HTML file that needs nothing else: no script, no other file. Text is escaped by construction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from gpuwatch.report.data import HEADINGS as WORKER_HEADINGS
from gpuwatch.report.data import data_lines
from gpuwatch.report.data import lines as worker_lines
from gpuwatch.report.modules import HEADINGS, lines
from gpuwatch.report.shape import Document, MemoryPart, RunPart, TimePart
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

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --data: #d9534f; --forward: #3c9d5b; --backward: #3b78c4;
  --optimizer: #9b59b6; --other: #8a8a8a; --critical: #c0392b; --warn: #b7791f; --info: #2471a3; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2rem; } .facts { color: #888; margin-top: .2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.track { width: 20rem; max-width: 40vw; background: var(--line); height: .9rem; margin-top: .3rem; }
.bar { height: 100%; }
article { border-left: .3rem solid var(--line); padding: .1rem 1rem; margin: 1.2rem 0; }
article h3 { margin: .2rem 0; } .critical { border-color: var(--critical); } .warn { border-color: var(--warn); }
.info { border-color: var(--info); } dt { font-weight: 600; float: left; clear: left; width: 4rem; }
dd { margin: 0 0 .3rem 4rem; overflow-wrap: anywhere; } code { color: #888; font-size: .85em; }
"""


def page(report: Document) -> str:
    """The report as the text of an HTML file."""
    run = report["run"]
    root = Element("html", lang="en")
    head = SubElement(root, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "title", f"{run['name']}: gpuwatch report")
    SubElement(head, "style").text = _STYLE
    body = SubElement(root, "body")
    _add(body, "h1", run["name"])
    _add(body, "p", state_line(run))
    _add(body, "p", facts_line(run), "facts")
    _add(body, "h2", "Time")
    _time(body, report["time"])
    _add(body, "h2", "Memory")
    _memory(body, report["memory"])
    if report["memory"]["modules"]:
        _table(body, HEADINGS, lines(report["memory"]["modules"]))
    if data_lines(report["data"]):
        _add(body, "h2", "Data")
        for line in data_lines(report["data"]):
            _add(body, "p", line)
        if report["data"]["worker_table"]:
            _table(body, WORKER_HEADINGS, worker_lines(report["data"]["worker_table"]))
    if len(run["ranks"]) > 1:
        _add(body, "h2", "Ranks")
        _ranks(body, run)
    _add(body, "h2", counted(len(report["findings"]), "finding") if report["findings"] else "Findings")
    if not report["findings"]:
        _add(body, "p", no_findings(report))
    for finding in report["findings"]:
        _finding(body, finding, len(run["ranks"]))
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def _add(parent: Element, tag: str, text: str, kind: str = "") -> Element:
    element = SubElement(parent, tag, {"class": kind} if kind else {})
    element.text = printable(text)
    return element


def _time(body: Element, time: TimePart) -> None:
    _add(body, "p", speed_line(time))
    table = SubElement(body, "table")
    for phase, spent in time["phases"].items():
        row = SubElement(table, "tr")
        _add(row, "td", phase)
        cell = SubElement(row, "td")
        if spent["share"] is None:
            _add(row, "td", NOT_KNOWN, "number")
            continue
        track = SubElement(cell, "div", {"class": "track"})
        SubElement(
            track,
            "div",
            {"class": "bar", "style": f"width: {100 * spent['share']:.1f}%; background: var(--{phase})"},
        )
        _add(row, "td", said(spent["share"], "ratio"), "number")
        _add(row, "td", said(spent["seconds"], "seconds"), "number")
    if beside_line(time):
        _add(body, "p", beside_line(time), "facts")


def _memory(body: Element, memory: MemoryPart) -> None:
    for line in memory_lines(memory) or [NOT_KNOWN]:
        _add(body, "p", line)


def _table(body: Element, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = SubElement(body, "table")
    row = SubElement(table, "tr")
    for number, heading in enumerate(headings):
        _add(row, "th", heading, "number" if number else "")
    for line in rows:
        row = SubElement(table, "tr")
        for number, cell in enumerate(line):
            _add(row, "td", cell, "number" if number else "")


def _ranks(body: Element, run: RunPart) -> None:
    table = SubElement(body, "table")
    row = SubElement(table, "tr")
    for heading in ("rank", "state", "steps", "median step", "data wait", "host peak", "device peak"):
        _add(row, "th", heading)
    for rank in run["ranks"]:
        row = SubElement(table, "tr")
        _add(row, "td", str(rank["rank"]))
        _add(row, "td", rank["state"])
        _add(row, "td", f"{rank['steps']:,}", "number")
        _add(row, "td", said(rank["step_seconds"]["p50"], "seconds"), "number")
        _add(row, "td", said(rank["data_share"], "ratio"), "number")
        _add(row, "td", said(rank["host_peak_bytes"], "bytes"), "number")
        _add(row, "td", said(rank["device_active_peak_bytes"], "bytes"), "number")


def _finding(body: Element, finding: Mapping[str, object], world: int) -> None:
    article = SubElement(body, "article", {"class": str(finding["severity"])})
    heading = _add(article, "h3", f"{finding['severity']}: {finding['summary']} ")
    _add(heading, "code", str(finding["rule"]))
    _add(article, "p", str(finding["evidence"]))
    facts = SubElement(article, "dl")
    for name in ("where", "fix", "gain", "check"):
        if finding[name]:
            _add(facts, "dt", name)
            _add(facts, "dd", str(finding[name]))
    if ranks_of(finding, world):
        _add(facts, "dt", "who")
        _add(facts, "dd", ranks_of(finding, world))
