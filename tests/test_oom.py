"""Memory that ran out: the error reaches the user, and the report says of which kind it was."""

from __future__ import annotations

import multiprocessing
import signal

import pytest
import torch

from gpuwatch.advisor import Finding, advise
from gpuwatch.reader import Snapshot, read
from gpuwatch.report.document import cause_of
from gpuwatch_hooks.accelerator import AllocatorCounters
from gpuwatch_hooks.oom import Circumstances, classify, is_out_of_memory, requested_bytes, shortage_of
from tests.loops import found, only
from tests.programs import Ended, Programs

GIB = 2**30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."
)

PROGRAM = """
import os, resource
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

LIMITED = """
import resource
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
"""Room for a GiB more."""


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


def from_a_pipe() -> BaseException:
    """The error of a worker that is gone before it could be asked."""
    reading, writing = multiprocessing.Pipe(duplex=False)
    writing.close()
    try:
        reading.recv()
    except EOFError as error:
        return error
    finally:
        reading.close()
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), True),
        (RuntimeError("DataLoader worker (pid(s) 71, 72) exited unexpectedly"), True),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Bus error. "), False),
        (from_a_pipe(), True),
        (EOFError("the end of a file of the program's own"), False),
        (ValueError("out of patience"), False),
    ],
    ids=["killed", "exited", "bus error", "a pipe", "a file", "something else"],
)
def test_a_dead_worker_was_killed_for_memory_where_the_kernel_counted_it(error: BaseException, expected: bool) -> None:
    shortage = shortage_of(error, Circumstances(kills=1))
    assert (shortage is not None and shortage.kind == "killed") is expected
    assert shortage_of(error, Circumstances()) is None


def run(programs: Programs, fail: str, before: str = "") -> tuple[Ended, Snapshot, list[Finding]]:
    """How a training that fails so ended, its record, and what is found."""
    ended = programs.run(before + PROGRAM.format(fail=fail))
    [record] = ended.records.glob("*.gpw")
    snapshot = read(record)
    return ended, snapshot, advise(snapshot)


def test_the_real_error_passes_and_its_place_is_named(programs: Programs) -> None:
    ended, snapshot, findings = run(programs, f"if step == 60: raise torch.OutOfMemoryError({MESSAGE!r})")
    assert ended.status == 1 and "OutOfMemoryError: CUDA out of memory" in ended.err
    finding = only(findings, "mem-oom")
    assert finding.severity == "critical" and "program.py:15 (fail)" in finding.where
    assert "at step 62: capacity" in finding.evidence and "2 GiB were asked for" in finding.evidence
    assert cause_of(snapshot) == "OutOfMemoryError"


def test_another_error_is_no_shortage(programs: Programs) -> None:
    ended, _, findings = run(programs, "if step == 60: raise ValueError('out of patience')")
    assert ended.status == 1 and not found(findings, "mem-oom")


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("kept.append(torch.ones(64, 2**20)) if step >= 40 else None", "allocate memory"),
        ("kept.append(b'x' * 2**28) if step >= 40 else None", "MemoryError"),
    ],
    ids=["torch", "Python"],
)
def test_a_process_out_of_address_space_says_host(programs: Programs, fail: str, message: str) -> None:
    ended, _, findings = run(programs, fail, LIMITED)
    assert ended.status == 1 and message in ended.err
    finding = only(findings, "mem-oom")
    assert finding.severity == "critical" and any(word in finding.evidence for word in ("host:", "leak:"))
    assert "(fail)" in finding.where


def test_native_code_that_aborts_for_want_of_memory_was_not_killed_by_the_kernel(programs: Programs) -> None:
    ended, snapshot, findings = run(programs, "if step == 60: os.abort()", LIMITED)
    assert ended.status == -signal.SIGABRT and found(findings, "run-dead") and not found(findings, "mem-oom")
    assert str(cause_of(snapshot)).startswith("gone without an end mark")
