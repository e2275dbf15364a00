"""A CUDA memory snapshot and a what-if on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpuwatch.allocator.parts import DevicePart, FailurePart, ReplayDocument, SnapshotDocument, TracePart
from gpuwatch.report.terminal import heading
from gpuwatch.report.wording import counted, printable, said

OWNERS_SHOWN = 12
KEPT_SHOWN = 6
DEFAULTS = "(torch's defaults)"


def snapshot_rendered(document: SnapshotDocument, name: str, encoding: str = "utf-8") -> RenderableType:
    """Who owns the memory, and what lies idle."""
    parts: list[RenderableType] = [heading(f"gpuwatch snapshot: {name}", encoding), Text(document["rules"], "dim")]
    for device in document["devices"]:
        parts += [Text(), *_device(device)]
    parts += _notes(document["notes"])
    return Group(*parts)


def replay_rendered(document: ReplayDocument, name: str, encoding: str = "utf-8") -> RenderableType:
    """What other settings would have led to."""
    recorded, recommended = document["recorded"], document["recommended"]
    parts: list[RenderableType] = [
        heading(f"gpuwatch replay: {name}", encoding),
        Text(document["rules"], "dim"),
        Text(fidelity_line(document["trace"])),
        Text(
            f"recorded on device {recorded['device']}: peak reserved {_bytes(recorded['peak_reserved_bytes'])}, "
            f"peak in use {_bytes(recorded['peak_active_bytes'])}, "
            f"stranded at the peak {_bytes(recorded['stranded_bytes'])}"
        ),
    ]
    if document["capacity_bytes"] is not None:
        parts.append(Text(f"capacity {_bytes(document['capacity_bytes'])}, from {document['capacity_from']}"))
    parts += [Text(), _settings(document), Text()]
    failed = document["settings"][0]["out_of_memory"]
    if failed is not None:
        parts.append(Text(f"As recorded: {failure_line(failed)}", "red"))
    parts.append(Text(printable(recommended["because"]), "bold green" if recommended["conf"] else "bold"))
    if recommended["conf"]:
        parts.append(Text(f"Set PYTORCH_CUDA_ALLOC_CONF={printable(recommended['conf'])} before torch is imported."))
        parts.append(Text("Modelled from torch's documented rules; this trace cannot confirm it.", "dim"))
    return Group(*parts, *_notes(document["notes"]))


def fidelity_line(trace: TracePart) -> str:
    """How faithful the replay is, in one line."""
    return (
        f"replayed {counted(trace['events'], 'event')}: {trace['address_matches']:,} of "
        f"{trace['allocations']:,} addresses and {trace['segment_matches']:,} of "
        f"{trace['segment_allocations']:,} segment allocations as recorded"
    )


def failure_line(failed: FailurePart) -> str:
    """Where memory runs out, in one line."""
    if failed["event"] < 0:
        return f"the memory in use before the trace begins, {_bytes(failed['active_bytes'])}, does not fit"
    return (
        f"runs out of memory at event {failed['event']:,}, {printable(failed['line'])}, which asks for "
        f"{_bytes(failed['requested_bytes'])} with {_bytes(failed['active_bytes'])} in use"
    )


def _settings(document: ReplayDocument) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("setting")
    columns = ["peak reserved", "stranded", "allocations", "frees"]
    if document["capacity_bytes"] is not None:
        columns.append("fits")
    for name in columns:
        table.add_column(name, justify="right")
    for number, row in enumerate(document["settings"]):
        conf = printable(row["conf"]) or DEFAULTS
        if number == 0:
            conf = f"as recorded: {conf}"
        elif row["modelled"]:
            conf += " (modelled)"
        cells = [_bytes(row["peak_reserved_bytes"]), _bytes(row["stranded_bytes"])]
        cells += [f"{row['device_allocations']:,}", f"{row['device_frees']:,}"]
        if row["fits"] is not None:
            cells.append("yes" if row["fits"] else "no")
        table.add_row(conf, *cells)
        if number == 0 and not document["recorded"]["trace_is_whole"]:
            rebuilt = _bytes(document["recorded"]["rebuilt_peak_reserved_bytes"])
            table.add_row("the same from the blocks in use at the start", rebuilt, style="dim")
    return table


def _device(device: DevicePart) -> Iterator[RenderableType]:
    end, peak = device["end"], device["peak"]
    yield Text.assemble((f"Device {device['device']}  ", "bold"), fidelity_line(device["trace"]))
    yield Text(
        f"at the end: reserved {_bytes(end['reserved_bytes'])}, in use {_bytes(end['active_bytes'])}, "
        f"allocated {_bytes(end['allocated_bytes'])}, requested {_bytes(end['requested_bytes'])}"
    )
    when = "before the first event" if peak["event"] < 0 else f"at event {peak['event']:,}"
    clock = f" ({peak['time']})" if peak["time"] else ""
    yield Text(
        f"peak: {_bytes(peak['active_bytes'])} in use {when}{clock}; reserved at most "
        f"{_bytes(device['peak_reserved_bytes'])}"
    )
    yield Text(f"at the peak: {', '.join(f'{name} {_bytes(size)}' for name, size in peak['categories'].items())}")
    yield Text()
    yield _owners(device)
    yield Text()
    yield _holes(device)
    growing = [kept for kept in device["kept"] if kept["bytes_per_step"] is not None]
    if growing:
        yield Text()
        yield Text(f"Grows with every one of {device['steps']} steps", "bold red")
        for kept in growing[:KEPT_SHOWN]:
            line = f"{_bytes(kept['bytes_per_step'] or 0)} a step: {printable(kept['line'])}"
            yield Padding(Text(line), (0, 0, 0, 2))


def _owners(device: DevicePart) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("at the peak", "at the end", "blocks"):
        table.add_column(name, justify="right")
    table.add_column("for")
    table.add_column("whose", overflow="fold")
    ends = {owner["line"]: owner["bytes"] for owner in device["end"]["owners"]}
    for owner in device["peak"]["owners"][:OWNERS_SHOWN]:
        left = ends.get(owner["line"], 0)
        size, blocks = _bytes(owner["bytes"]), f"{owner['blocks']:,}"
        table.add_row(size, _bytes(left), blocks, owner["category"], Text(printable(owner["line"])))
    return table


def _holes(device: DevicePart) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("idle memory at the end")
    table.add_column("stream", justify="right")
    for name in ("segments", "reserved", "in use", "stranded", "largest hole"):
        table.add_column(name, justify="right")
    for hole in device["holes"][:OWNERS_SHOWN]:
        table.add_row(
            f"{hole['pool']}{', expandable' if hole['expandable'] else ''}",
            str(hole["stream"]),
            f"{hole['segments']:,}",
            _bytes(hole["reserved_bytes"]),
            _bytes(hole["active_bytes"]),
            _bytes(hole["stranded_bytes"]),
            _bytes(hole["largest_hole_bytes"]),
        )
    return table


def _notes(notes: list[str]) -> list[RenderableType]:
    return [Text(), *(Text(f"note: {printable(note)}", "dim") for note in notes)] if notes else []


def _bytes(size: int) -> str:
    return said(size, "bytes")
