"""The data path in a report: its lines, its table of workers, and what is not known."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader

import gpuwatch
from gpuwatch.catalog import (
    LOADER_BATCH,
    LOADER_BATCH_BYTES,
    LOADER_BATCH_SECONDS,
    LOADER_PART_SECONDS,
    LOADER_PREFETCH,
    LOADER_READY,
    LOADER_WORKERS,
    WORKER_DEATHS,
)
from gpuwatch.layout import WORKER_ROW, State
from gpuwatch.reader import read
from gpuwatch.record import RecordWriter
from gpuwatch.report.data import data_lines, data_of, lines
from gpuwatch.report.document import document
from gpuwatch.report.html import page
from gpuwatch.report.shape import Document
from gpuwatch.report.terminal import rendered
from tests.loops import Slow, perceptron
from tests.recorded import write_run

ROWS = {
    0: {"batches": 61, "busy": 0.93, "core_wait": 0.02, "cpu": 0.11, "blocked": 0.87, "resident": 3e8, "starts": 1},
    1: {"batches": 58, "busy": 0.91},
}


def fed(directory: Path, rank: int = 0, **values: float) -> RecordWriter:
    """A run of two workers."""
    gauges = {LOADER_WORKERS.name: 2.0, LOADER_PREFETCH.name: 4.0, LOADER_BATCH.name: 32, LOADER_READY.name: 0.4}
    sizes = {LOADER_BATCH_BYTES.name: 3 << 20}
    writer = write_run(directory, rank=rank, world_size=1 + rank, state=None, values={**gauges, **sizes, **values})
    for quantile, seconds in (("0.5", 0.024), ("0.9", 0.05)):
        writer.values[writer.series(LOADER_BATCH_SECONDS.name, quantile=quantile)] = seconds
    for part, seconds in (("items", 0.022), ("collate", 0.002)):
        writer.values[writer.series(LOADER_PART_SECONDS.name, part=part)] = seconds
    for worker, row in ROWS.items():
        for part, number in row.items():
            writer.values[writer.series(WORKER_ROW, worker=str(worker), part=part)] = number
    return writer


def report_of(directory: Path) -> Document:
    """The report on the one run there."""
    return document([read(path) for path in sorted(directory.glob("*.gpw"))])


def shown(report: Document) -> str:
    """What the terminal shows."""
    console = Console(width=100)
    with console.capture() as captured:
        console.print(rendered(report))
    return captured.get()


def test_the_report_tells_setting_batch_and_workers(tmp_path: Path) -> None:
    fed(tmp_path, **{WORKER_DEATHS.name: 1}).close(State.CLEAN)
    report = report_of(tmp_path)
    data = report["data"]
    assert (data["workers"], data["prefetch"], data["batch_items"], data["worker_deaths"]) == (2, 4, 32, 1)
    assert data["batch_seconds"] == {"p10": None, "p50": 0.024, "p90": 0.05, "p99": None}
    assert data["parts_seconds"]["items"] == 0.022 and data["parts_seconds"]["copy"] is None
    assert data["wait_share"] == pytest.approx(0.3)
    assert [row["worker"] for row in data["worker_table"]] == [0, 1]
    for text in (shown(report), page(report)):
        for said in ("2 workers, prefetch factor 4", "a batch of 32 items, 3 MiB, made in 24 ms, items 22 ms"):
            assert said in text
        assert "40 % of batches were ready when asked for, 1 worker died" in text
        assert "87 %" in text and "286 MiB" in text


def test_a_cell_that_is_not_known_is_blank(tmp_path: Path) -> None:
    fed(tmp_path).close(State.CLEAN)
    first, second = lines(report_of(tmp_path)["data"]["worker_table"])
    assert first == ("0", "61", "93 %", "2.0 %", "11 %", "87 %", "286 MiB", "", "1")
    assert second == ("1", "58", "91 %", *[""] * 6)


def test_a_run_without_a_loader_has_no_section(tmp_path: Path) -> None:
    write_run(tmp_path, values={LOADER_WORKERS.name: float("nan")})
    report = report_of(tmp_path)
    assert data_lines(report["data"]) == [] and report["data"]["worker_table"] == []
    assert "Data  " not in shown(report) and "<h2>Data</h2>" not in page(report)


def test_of_several_ranks_the_one_that_waits_most_is_told(tmp_path: Path) -> None:
    fed(tmp_path).close(State.CLEAN)
    starved = {"data": 0.08, "forward": 0.02}
    writer = write_run(tmp_path, rank=1, world_size=2, step=starved, state=None, values={LOADER_WORKERS.name: 7.0})
    writer.close(State.CLEAN)
    assert report_of(tmp_path)["data"]["workers"] == 7


def test_rows_of_a_damaged_record_are_left_out(tmp_path: Path) -> None:
    writer = fed(tmp_path)
    for labels in ({"worker": "-1", "part": "busy"}, {"worker": "x", "part": "busy"}, {"worker": "2", "part": "busy"}):
        writer.values[writer.series(WORKER_ROW, **labels)] = float("inf")
    writer.values[writer.series(WORKER_ROW, worker="3")] = 1.0
    writer.close(State.CLEAN)
    assert [row["worker"] for row in report_of(tmp_path)["data"]["worker_table"]] == [0, 1]


def test_workers_of_a_real_loader_have_their_rows(records: Path) -> None:
    model, loader = perceptron(), DataLoader(Slow(80, 0.004), batch_size=1, num_workers=2, persistent_workers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(0.002)
    watch.detach()
    (path,) = records.glob("*.gpw")
    data = data_of(read(path))
    first, second = data["worker_table"]
    assert (first["batches"] or 0) + (second["batches"] or 0) >= 40 and first["starts"] == 1
    assert first["busy_share"] and first["cpu_share"] is not None and first["resident_bytes"]
    assert data["parts_seconds"]["items"] and data["parts_seconds"]["items"] >= 0.004
