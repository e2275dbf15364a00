"""A CUDA memory snapshot as one HTML file: the tables, and the memory over time stacked by owner. No script."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, fromstring, register_namespace, tostring

from gpuwatch.allocator.accounting import Account, Timeline
from gpuwatch.allocator.parts import DevicePart, SnapshotDocument
from gpuwatch.report.snapshot import fidelity_line
from gpuwatch.report.wording import printable, said

OWNERS_DRAWN = 9
GIB = 1 << 30
SVG = "http://www.w3.org/2000/svg"
LABEL_LETTERS = 60

_STYLE = """
:root { color-scheme: light; } body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; color: #222; background: #fff; } table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.dim { color: #777; } svg { max-width: 100%; height: auto; }
"""


class PlotLibraryMissing(RuntimeError):
    """The picture needs a library that is not installed; the text is one line that says which."""


def snapshot_page(document: SnapshotDocument, accounts: Sequence[Account], name: str) -> str:
    """The report as the text of an HTML file. Raises PlotLibraryMissing."""
    root = Element("html", lang="en")
    head = SubElement(root, "head")
    SubElement(head, "meta", charset="utf-8")
    _add(head, "title", f"{name}: gpuwatch snapshot")
    SubElement(head, "style").text = _STYLE
    body = SubElement(root, "body")
    _add(body, "h1", name)
    _add(body, "p", document["rules"], "dim")
    for device, account in zip(document["devices"], accounts, strict=True):
        _device(body, device, account)
    for note in document["notes"]:
        _add(body, "p", f"note: {note}", "dim")
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def _device(body: Element, device: DevicePart, account: Account) -> None:
    _add(body, "h2", f"Device {device['device']}")
    _add(body, "p", fidelity_line(device["trace"]))
    peak, end = device["peak"], device["end"]
    _add(
        body,
        "p",
        f"Peak {said(peak['active_bytes'], 'bytes')} in use, at most {said(device['peak_reserved_bytes'], 'bytes')} "
        f"reserved; at the end {said(end['active_bytes'], 'bytes')} in use of {said(end['reserved_bytes'], 'bytes')}.",
    )
    body.append(picture(account.timeline))
    rows = [
        (said(owner["bytes"], "bytes"), f"{owner['blocks']:,}", owner["category"], owner["line"])
        for owner in peak["owners"]
    ]
    _table(body, ("at the peak", "blocks", "for", "whose"), rows, numbers=2)
    idle = [
        (
            said(hole["stranded_bytes"], "bytes"),
            said(hole["largest_hole_bytes"], "bytes"),
            said(hole["reserved_bytes"], "bytes"),
            f"{hole['pool']}, stream {hole['stream']}{', expandable' if hole['expandable'] else ''}",
        )
        for hole in device["holes"]
    ]
    _table(body, ("stranded", "largest hole", "reserved", "pool"), idle, numbers=3)
    growing = [
        (said(kept["bytes_per_step"], "bytes"), said(kept["bytes"], "bytes"), kept["line"])
        for kept in device["kept"]
        if kept["bytes_per_step"] is not None
    ]
    if growing:
        _add(body, "h3", f"Grows with every one of {device['steps']} steps")
        _table(body, ("a step", "in all", "whose"), growing, numbers=2)


def picture(timeline: Timeline) -> Element:
    """The memory over time, stacked by owner, as an SVG element. Raises PlotLibraryMissing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotLibraryMissing(
            "the picture needs matplotlib: pip install 'torch-gpuwatch[plot]' (or matplotlib)"
        ) from None
    series, labels = _largest(timeline)
    text = io.StringIO()
    # Text stays text, and a `$` in a source line is no formula.
    with matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter that the font lacks: the reader's browser has others
        figure = Figure(figsize=(12, 5))
        axes = figure.add_subplot()
        steps = list(timeline.events)
        axes.stackplot(steps, [[size / GIB for size in row] for row in series], labels=labels, linewidth=0)
        axes.plot(steps, [size / GIB for size in timeline.reserved], color="black", linewidth=1, label="reserved")
        axes.set_xlabel("event")
        axes.set_ylabel("GiB")
        axes.margins(x=0)
        handles, names = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    register_namespace("", SVG)
    register_namespace("xlink", "http://www.w3.org/1999/xlink")
    drawn = fromstring(text.getvalue())
    for made_by in drawn.findall(f"{{{SVG}}}metadata"):
        drawn.remove(made_by)
    return drawn


def _largest(timeline: Timeline) -> tuple[list[list[int]], list[str]]:
    """The owners that ever held the most, the rest summed up: bytes by sample, and their names."""
    columns = list(zip(*timeline.sizes, strict=True))
    order = sorted(range(len(columns)), key=lambda owner: max(columns[owner]), reverse=True)
    drawn = [owner for owner in order[:OWNERS_DRAWN] if max(columns[owner])]
    rest = [owner for owner in order[OWNERS_DRAWN:] if max(columns[owner])]
    series = [list(columns[owner]) for owner in drawn]
    labels = [_label(timeline.owners[owner].line) for owner in drawn]
    if rest:
        series.append([sum(columns[owner][sample] for owner in rest) for sample in range(len(timeline.sizes))])
        labels.append(f"{len(rest)} others")
    return series, labels


def _label(line: str) -> str:
    text = printable(line)
    return "source: " + text if text.startswith("_") else text[-LABEL_LETTERS:]


def _table(body: Element, names: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> None:
    table = SubElement(body, "table")
    for row in (names, *rows):
        line = SubElement(table, "tr")
        for position, text in enumerate(row):
            _add(line, "th" if row is names else "td", text, "number" if position < numbers else "")


def _add(parent: Element, tag: str, text: str, kind: str = "") -> Element:
    element = SubElement(parent, tag, {"class": kind} if kind else {})
    element.text = printable(text)
    return element
