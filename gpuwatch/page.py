"""The status page of a node: what runs, where its time goes, what is wrong and what to do about it.

Built as a tree and written out as HTML, so that whatever a record holds is shown as text. No script, nothing from
elsewhere. The daemon has it made by a process of its own (:mod:`gpuwatch.aside`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from gpuwatch import aside
from gpuwatch.advisor import Finding, advise_gpu
from gpuwatch.catalog import GPU_THROTTLED
from gpuwatch.follower import header
from gpuwatch.gpuseries import gpu_series
from gpuwatch.inventory import Leases, take_inventory
from gpuwatch.lifecycle import STATES, last_seen, state_of
from gpuwatch.nvml import GpuReading
from gpuwatch.pagestyle import STYLE
from gpuwatch.reader import RecordError, Snapshot, read
from gpuwatch.report.document import document
from gpuwatch.report.runs import started_together
from gpuwatch.report.shape import Document, RankPart
from gpuwatch.report.wording import (
    beside_line,
    counted,
    facts_line,
    memory_lines,
    no_findings,
    printable,
    ranks_of,
    said,
    speed_line,
)
from gpuwatch.sampler import Sampler
from gpuwatch.version import __version__

REFRESH_SECONDS = 5
RUNS_IN_FULL = 4
"""The newest runs, shown with everything; those before get a line each."""

RUNS_LISTED = 40
RANKS_SHOWN = 64
RANKS_READ = 96
"""Ranks of a page that are read whole, the newest run's first: 1 MB each. Of others it shows what their headers say."""


HOW_TO_ATTACH = "import gpuwatch\n\ngpuwatch.attach(model, loader)  # before the training loop"


def page(directory: Path, sampler: Sampler) -> bytes:
    """The page of a directory of records as it is now. Raises OSError when the directory cannot be read."""
    heads, rejected = _heads(directory)
    root, body = _frame(directory)
    runs = list(_runs(heads))
    if not runs:
        _nothing_yet(body)
    left = RANKS_READ
    for ranks in runs[:RUNS_IN_FULL]:
        _run(body, _whole(ranks, left))
        left = max(0, left - len(ranks))
    _older(body, runs[RUNS_IN_FULL : RUNS_IN_FULL + RUNS_LISTED])
    _gpus(body, sampler)
    _rejected(body, rejected)
    return b"<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html").encode() + b"\n"


def _heads(directory: Path) -> tuple[list[Snapshot], list[str]]:
    """The headers of all records, and why others could not be read: most of them get a line, or none."""
    heads, rejected = [], []
    for entry in take_inventory(directory, Leases()).entries:
        try:
            heads.append(header(entry.path))
        except FileNotFoundError:
            continue  # removed between the listing and the look
        except RecordError as reason:
            rejected.append(str(reason))
        except OSError as reason:
            rejected.append(f"{entry.path.name}: {reason.strerror}")
    return heads, rejected


def _frame(directory: Path) -> tuple[Element, Element]:
    root = Element("html", lang="en")
    head = SubElement(root, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "meta", {"http-equiv": "refresh", "content": str(REFRESH_SECONDS)})
    _add(head, "title", "gpuwatch")
    SubElement(head, "style").text = STYLE
    body = SubElement(root, "body")
    header = SubElement(body, "header")
    _add(header, "h1", "gpuwatch")
    links = _add(header, "p", f"{directory} · version {__version__} · ", "dim")
    SubElement(links, "a", href="/metrics").text = "metrics"
    return root, body


def _runs(snapshots: Sequence[Snapshot]) -> Iterator[list[Snapshot]]:
    """The starts of runs, newest first: for each, one record per rank."""
    left = sorted(snapshots, key=lambda snapshot: (snapshot.up, snapshot.created))
    while left:
        ranks = started_together(left[-1], left)
        yield ranks
        shown = {snapshot.path for snapshot in ranks}
        left = [snapshot for snapshot in left if snapshot.path not in shown]


def _whole(ranks: Sequence[Snapshot], most: int) -> list[Snapshot]:
    """The records of a run, at most so many with everything: those in the most alarming state, and the lowest."""
    alarming = sorted(ranks, key=lambda snapshot: (STATES.index(state_of(snapshot)), snapshot.rank))
    chosen = {snapshot.path for snapshot in alarming[:most]}
    return [_read(snapshot) if snapshot.path in chosen else snapshot for snapshot in ranks]


def _read(head: Snapshot) -> Snapshot:
    try:
        return read(head.path)
    except (OSError, RecordError):
        return head  # removed meanwhile


def _nothing_yet(body: Element) -> None:
    section = SubElement(body, "section")
    _add(section, "h2", "No run yet")
    _add(section, "p", "Add one line to a training script and start it:")
    _add(SubElement(section, "pre"), "code", "").text = HOW_TO_ATTACH
    _add(section, "p", "or change nothing and start it with:")
    _add(SubElement(section, "pre"), "code", "gpuwatch run train.py")


def _run(body: Element, ranks: Sequence[Snapshot]) -> None:
    report = document(ranks)
    section = SubElement(body, "section")
    title = _add(section, "div", "", "title")
    _add(title, "h2", report["run"]["name"])
    _badge(title, report["run"]["state"])
    _add(title, "span", speed_line(report["time"]), "dim")
    _add(section, "p", facts_line(report["run"]), "dim")
    if report["run"]["cause"]:
        _add(section, "p", report["run"]["cause"])
    _time(section, report)
    for line in memory_lines(report["memory"]):
        _add(section, "p", line)
    _ranks(section, ranks, report["run"]["ranks"])
    _add(section, "h4", "Findings")
    for finding in report["findings"]:
        _finding(section, finding, ranks_of(finding, len(ranks)))
    if not report["findings"]:
        _add(section, "p", no_findings(report), "dim")


def _time(section: Element, report: Document) -> None:
    shares = {phase: spent["share"] for phase, spent in report["time"]["phases"].items()}
    known = {phase: share for phase, share in shares.items() if share is not None}
    if not known:
        return
    _add(section, "h4", "Time of a step")
    bar = _add(section, "div", "", "split")
    key = _add(section, "div", "", "key")
    for phase, share in known.items():
        width = 100 * min(1.0, max(0.0, share))
        SubElement(bar, "div", style=f"width: {width:.2f}%; background: var(--{phase})")
        entry = SubElement(key, "span")
        dot = SubElement(entry, "span", {"class": "dot", "style": f"background: var(--{phase})"})
        dot.tail = f"{phase} {said(share, 'ratio')}"
    if beside_line(report["time"]):
        _add(section, "p", beside_line(report["time"]), "dim")


def _ranks(section: Element, ranks: Sequence[Snapshot], parts: Sequence[RankPart]) -> None:
    _add(section, "h4", "Ranks")
    columns = ("rank", "state", "last step", "median step", "data wait", "host peak", "device peak", "last seen")
    table = _table(section, columns)
    for snapshot, part in list(zip(ranks, parts, strict=True))[:RANKS_SHOWN]:
        row = SubElement(table, "tr")
        _add(row, "td", str(snapshot.rank))
        _badge(SubElement(row, "td"), part["state"])
        _add(row, "td", f"{snapshot.step:,}", "number")
        _add(row, "td", said(part["step_seconds"]["p50"], "seconds"), "number")
        _add(row, "td", said(part["data_share"], "ratio"), "number")
        _add(row, "td", said(part["host_peak_bytes"], "bytes"), "number")
        _add(row, "td", said(part["device_active_peak_bytes"], "bytes"), "number")
        _add(row, "td", _seen(snapshot), "number")
    if len(ranks) > RANKS_SHOWN:
        _add(section, "p", f"and {counted(len(ranks) - RANKS_SHOWN, 'rank')} more", "dim")


def _seen(snapshot: Snapshot) -> str:
    age = snapshot.progress_age if snapshot.up else max(0.0, time.time() - last_seen(snapshot))
    return f"{said(age, 'seconds')} ago"


def _finding(section: Element, finding: Mapping[str, object], whose: str) -> None:
    severity = str(finding["severity"])
    article = _add(section, "div", "", f"finding {severity}")
    title = _add(article, "div", "", "title")
    _badge(title, severity)
    _add(title, "h3", str(finding["summary"]))
    _add(title, "code", str(finding["rule"])).set("class", "dim")
    _add(article, "p", str(finding["evidence"]))
    facts = SubElement(article, "dl")
    for name in ("where", "fix", "gain", "check"):
        if finding[name]:
            _add(facts, "dt", name)
            _add(facts, "dd", str(finding[name]))
    if whose:
        _add(facts, "dt", "who")
        _add(facts, "dd", whose)


def _older(body: Element, runs: Sequence[Sequence[Snapshot]]) -> None:
    if not runs:
        return
    section = SubElement(body, "section")
    _add(section, "h2", "Earlier runs")
    table = _table(section, ("run", "state", "ranks", "last step", "last seen"))
    for ranks in runs:
        row = SubElement(table, "tr")
        latest = max(ranks, key=last_seen)
        _add(row, "td", latest.run)
        _badge(SubElement(row, "td"), state_of(latest))
        _add(row, "td", str(len(ranks)), "number")
        _add(row, "td", f"{latest.step:,}", "number")
        _add(row, "td", _seen(latest), "number")


def _gpus(body: Element, sampler: Sampler) -> None:
    section = SubElement(body, "section")
    _add(section, "h2", "GPUs")
    sample = sampler.latest()
    if sample is None:
        _add(section, "p", sampler.unavailable() or "", "dim")
        return
    table = _table(section, ("gpu", "name", "busy", "memory", "power", "temperature", "clock", "processes", ""))
    findings: list[tuple[Finding, GpuReading]] = []
    for reading in sample.readings:
        _gpu(SubElement(table, "tr"), reading)
        place = f"GPU {reading.index} ({reading.uuid or 'no uuid'})"
        findings += [(_named(finding, reading), reading) for finding in advise_gpu(sampler.history(reading), place)]
    for finding, _ in findings:
        _finding(section, finding.as_dict(), "")


def _named(finding: Finding, reading: GpuReading) -> Finding:
    """A finding on strangers says who they are."""
    strangers = _strangers(reading) if finding.rule == "mem-foreign-process" else ""
    return replace(finding, where=finding.where + strangers) if strangers else finding


def _strangers(reading: GpuReading) -> str:
    """The largest processes of no watched run, by number; empty where there are none."""
    largest = sorted(reading.foreign_processes or (), key=lambda process: -process[1])[:3]
    return "".join(f", pid {pid} holds {said(size, 'bytes')}" for pid, size in largest)


def _gpu(row: Element, reading: GpuReading) -> None:
    _add(row, "td", str(reading.index))
    _add(row, "td", reading.name or "")
    _add(row, "td", said(reading.utilization_ratio, "ratio"), "number")
    _add(row, "td", _of(reading.memory_used_bytes, reading.memory_total_bytes, "bytes"), "number")
    _add(row, "td", _of(reading.power_watts, reading.power_limit_watts, "watts"), "number")
    _add(row, "td", said(reading.temperature_celsius, "celsius"), "number")
    _add(row, "td", _of(reading.sm_clock_hertz, reading.sm_clock_max_hertz, "hertz"), "number")
    _add(row, "td", "" if reading.processes is None else str(len(reading.processes)), "number")
    state = SubElement(row, "td")
    if any(metric is GPU_THROTTLED and number for metric, _, number in gpu_series(reading)):
        _badge(state, "critical", "throttled")


def _of(number: float | None, whole: float | None, unit: str) -> str:
    if unit == "watts":
        return " of ".join(f"{watts:.0f} W" for watts in (number, whole) if watts is not None)
    return said(number, unit) if whole is None else f"{said(number, unit)} of {said(whole, unit)}"


def _rejected(body: Element, rejected: Sequence[str]) -> None:
    if not rejected:
        return
    section = SubElement(body, "section")
    _add(section, "h2", f"{counted(len(rejected), 'file')} passed over")
    for reason in rejected[:8]:
        _add(section, "p", reason, "dim")


def _table(section: Element, columns: Sequence[str]) -> Element:
    table = SubElement(_add(section, "div", "", "scroll"), "table")
    row = SubElement(table, "tr")
    for column in columns:
        _add(row, "th", column)
    return table


def _badge(parent: Element, kind: str, text: str = "") -> None:
    _add(parent, "span", text or kind, f"badge {kind}")


def _add(parent: Element, tag: str, text: str, kind: str = "") -> Element:
    element = SubElement(parent, tag, {"class": kind} if kind else {})
    element.text = printable(text)
    return element


if __name__ == "__main__":
    told = aside.begin()
    sys.stdout.buffer.write(page(Path(sys.argv[1]), Sampler.of(told)))
