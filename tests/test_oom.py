"""Memory that ran out: the error reaches the user, and the report says of which kind it was."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuwatch_hooks.accelerator import AllocatorCounters
from gpuwatch_hooks.oom import classify, is_out_of_memory, requested_bytes

GIB = 2**30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."
)

PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import gpuwatch

loader = DataLoader(TensorDataset(torch.randn(400, 8)), batch_size=4)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
kept = []
gpuwatch.attach(model, loader, name="short")

def fail(step):
    {fail}

for step, (inputs,) in enumerate(loader):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    fail(step)
"""


def counters(allocated: float, reserved: float, peak: float | None = None) -> AllocatorCounters:
    """An 80 GiB device with so many GiB allocated and reserved."""
    active_peak = int((peak if peak is not None else allocated) * GIB)
    return AllocatorCounters(
        allocated_bytes=int(allocated * GIB),
        reserved_bytes=int(reserved * GIB),
        active_peak_bytes=active_peak,
        capacity_bytes=80 * GIB,
    )


@pytest.mark.parametrize(
    ("kind", "allocated", "reserved", "used", "leaking", "usual_peak"),
    [
        ("capacity", 76, 78, 79, False, 75),
        ("fragmentation", 60, 78, 79, False, 75),
        ("foreign", 50, 51, 79, False, 50),
        ("leak", 76, 78, 79, True, None),
        ("spike", 76, 78, 79, False, 40),
    ],
)
def test_the_kind_of_a_shortage_follows_from_its_numbers(
    kind: str, allocated: float, reserved: float, used: float, leaking: bool, usual_peak: float | None
) -> None:
    usual = None if usual_peak is None else int(usual_peak * GIB)
    assert classify(2 * GIB, counters(allocated, reserved), int(used * GIB), leaking, usual) == kind


def test_the_request_is_read_from_the_message() -> None:
    assert requested_bytes(MESSAGE) == 2 * GIB
    assert requested_bytes("HIP out of memory. Tried to allocate 20.00 MiB (GPU 0)") == 20 * 2**20
    assert requested_bytes("something else") is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(MESSAGE), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_an_out_of_memory_error_is_told_from_others(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def run(directory: Path, fail: str, limit: Callable[[], None] | None = None) -> tuple[Any, dict[str, Any]]:
    """A training that fails so, and its report."""
    script = directory / "train.py"
    script.write_text(PROGRAM.format(fail=fail))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, preexec_fn=limit)
    report = subprocess.run([sys.executable, "-m", "gpuwatch", "report", "--json"], capture_output=True, text=True)
    return ran, json.loads(report.stdout)


def of_rule(report: dict[str, Any], rule: str) -> dict[str, Any]:
    """The one finding of a rule."""
    (finding,) = [finding for finding in report["findings"] if finding["rule"] == rule]
    return dict(finding)


def test_the_real_error_passes_and_its_place_is_named(records: Path, tmp_path: Path) -> None:
    ran, report = run(tmp_path, f"if step == 60: raise torch.OutOfMemoryError({MESSAGE!r})")
    assert ran.returncode == 1 and "OutOfMemoryError: CUDA out of memory" in ran.stderr
    finding = of_rule(report, "mem-oom")
    assert finding["severity"] == "critical" and "train.py:15 (fail)" in finding["where"]
    assert "at step 62: capacity" in finding["evidence"] and "2 GiB were asked for" in finding["evidence"]


def test_another_error_is_no_shortage(records: Path, tmp_path: Path) -> None:
    ran, report = run(tmp_path, "if step == 60: raise ValueError('out of patience')")
    assert ran.returncode == 1 and not [finding for finding in report["findings"] if finding["rule"] == "mem-oom"]


def test_a_process_out_of_address_space_says_host(records: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 * GIB, 3 * GIB))

    ran, report = run(tmp_path, "kept.append(torch.ones(64, 2**20)) if step >= 40 else None", limit)
    assert ran.returncode == 1 and "allocate memory" in ran.stderr
    assert any(word in of_rule(report, "mem-oom")["evidence"] for word in ("host:", "leak:"))
