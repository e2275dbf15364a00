"""The table of modules in a report: out of a record, as data and for people."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from gpuwatch.layout import MODULE_ROW
from gpuwatch.rankseries import rank_series
from gpuwatch.reader import read
from gpuwatch.record import RecordWriter
from gpuwatch.report.document import document
from gpuwatch.report.html import page
from gpuwatch.report.modules import SHOWN
from gpuwatch.report.shape import Document
from gpuwatch.report.terminal import rendered
from tests.recorded import write_run

MIB = 1 << 20
KEPT: list[RecordWriter] = []
"""Writers of open records: without them the lease would go."""


def with_rows(directory: Path, count: int, rank: int = 0, scale: int = 1) -> Path:
    """A record with a table of this many modules."""
    writer = write_run(directory, rank=rank, world_size=2, state=None)
    for number in range(count):
        row = {
            "count": 2,
            "parameters": 4 * MIB * scale,
            "gradients": 0,
            "optimizer": 0,
            "activations": number * MIB,
            "reached": (number + 1) * MIB,
        }
        for part, size in row.items():
            writer.values[writer.series(MODULE_ROW, module=f"layers.*.part_{number}", part=part)] = size
    KEPT.append(writer)
    return writer.path


def shown(report: Document, width: int = 120) -> str:
    """The report as a terminal of so many columns shows it."""
    console = Console(width=width)
    with console.capture() as captured:
        console.print(rendered(report))
    return captured.get()


def test_the_largest_module_comes_first_and_all_are_in_the_data(tmp_path: Path) -> None:
    parts = document([read(with_rows(tmp_path, 20))])["memory"]["modules"]
    assert parts is not None and len(parts) == 20
    assert parts[0] == {
        "module": "layers.*.part_19",
        "modules": 2,
        "parameters_bytes": 4 * MIB,
        "gradients_bytes": 0,
        "optimizer_bytes": 0,
        "activations_bytes": 19 * MIB,
        "reached_bytes": 20 * MIB,
    }


def test_people_see_the_first_and_the_sum_of_the_rest(tmp_path: Path) -> None:
    report = document([read(with_rows(tmp_path, 20))])
    text = shown(report)
    assert "saved for backward" in text and "layers.*.part_19" in text and "19 MiB" in text
    rest = sum(4 + number for number in range(20 - SHOWN))
    assert f"8 more: {rest} MiB" in text and "layers.*.part_7" not in text
    assert "<td>layers.*.part_19</td>" in page(report) and f"8 more: {rest} MiB" in page(report)


def test_what_was_not_measured_is_not_known(tmp_path: Path) -> None:
    writer = write_run(tmp_path)
    report = document([read(writer.path)])
    assert report["memory"]["modules"] is None
    assert "saved for backward" not in shown(report) + page(report)


def test_of_several_ranks_the_largest_table_is_shown(tmp_path: Path) -> None:
    ranks = [read(with_rows(tmp_path, 3)), read(with_rows(tmp_path, 3, rank=1, scale=10))]
    parts = document(ranks)["memory"]["modules"]
    assert parts is not None and parts[0]["parameters_bytes"] == 40 * MIB


def test_the_table_is_no_series_and_not_counted_as_left_out(tmp_path: Path) -> None:
    published = rank_series(read(with_rows(tmp_path, 20)))
    assert published.dropped == 0
    assert not any("module" in metric.labels for metric, _, _ in published.series)


def test_a_hostile_table_is_only_text(tmp_path: Path) -> None:
    writer = write_run(tmp_path, state=None)
    name = "\x1b[31m<script>"
    writer.values[writer.series(MODULE_ROW, module=name, part="activations")] = MIB
    writer.values[writer.series(MODULE_ROW, module="odd", part="nonsense")] = float("inf")
    report = document([read(writer.path)])
    assert "\x1b" not in shown(report) and "<script>" not in page(report)


def test_a_narrow_terminal_still_tells_modules_apart(tmp_path: Path) -> None:
    text = shown(document([read(with_rows(tmp_path, 20))]), width=80)
    for number in range(8, 20):
        assert f"art_{number}" in text
    assert "…" not in text[text.index("module") : text.index("8 more")]
