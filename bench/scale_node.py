"""One node: what a scrape of its daemon costs, what the daemon holds, what a training notices of it."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCRAPE_SECONDS = 0.5
SCRAPES = 40

_ASKED = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}

_TRAIN = """
import statistics, sys, time
import torch
from torch import nn
import gpuwatch

torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(64, 256)
gpuwatch.attach(model, name="noticed")

def block():
    seconds = []
    cpu = time.process_time()
    end = time.perf_counter() + 2
    while (began := time.perf_counter()) < end:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), (time.process_time() - cpu) / len(seconds)

block()
for _ in sys.stdin:
    print(*block(), flush=True)
"""


@dataclass(frozen=True)
class NodeCost:
    """What was measured: medians of scrapes in seconds, CPU in seconds, bytes."""

    ranks: int
    series: int
    scrape_seconds: float
    scrape_cpu_seconds: float
    idle_cpu_seconds: float
    resident_bytes: int
    largest_bytes: int


@contextlib.contextmanager
def daemon(directory: Path) -> Iterator[tuple[int, str]]:
    """A daemon that serves the directory: its pid and its address."""
    command = [sys.executable, "-m", "gpuwatch", "serve", "--dir", str(directory), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = re.search(r"http://\S+", process.stderr.readline())
    assert found is not None
    yield process.pid, found[0]
    process.terminate()
    process.communicate()


@contextlib.contextmanager
def living(template: Path, directory: Path, ranks: int, steps_a_second: float) -> Iterator[None]:
    """Ranks that write their records meanwhile."""
    command = [sys.executable, "-m", "bench.scale_records", str(template), str(directory), str(ranks)]
    process = subprocess.Popen(
        [*command, str(steps_a_second)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield
    process.communicate()


def measure_node(template: Path, directory: Path, ranks: int, steps_a_second: float = 10.0) -> NodeCost:
    """Scrape a daemon of so many living ranks as Prometheus does, and read its own counts."""
    with living(template, directory, ranks, steps_a_second), daemon(directory) as (pid, url):
        for _ in range(5):
            scrape(url)
        text = urllib.request.urlopen(url + "metrics").read().decode()
        began, before = time.monotonic(), cpu_seconds(pid)
        time.sleep(5)
        idle = (cpu_seconds(pid) - before) / (time.monotonic() - began)
        began, before = time.monotonic(), cpu_seconds(pid)
        taken = []
        for _ in range(SCRAPES):
            taken.append(scrape(url))
            time.sleep(SCRAPE_SECONDS)
        spent = cpu_seconds(pid) - before - idle * (time.monotonic() - began)
        return NodeCost(
            ranks,
            len(re.findall(r"(?m)^gpuwatch", text)),
            statistics.median(taken),
            spent / SCRAPES,
            idle,
            1024 * status(pid, "VmRSS"),
            1024 * status(pid, "VmHWM"),
        )


def measure_training(directory: Path) -> tuple[float, float, float, float]:
    """A training's median step and its own CPU time a step, in seconds: not scraped, then scraped twice a second.

    In turns, since other work on the machine comes and goes; the CPU time is what that hardly touches.
    """
    environment = dict(os.environ, GPUWATCH_DIR=str(directory), GPUWATCH_DAEMON="0", GPUWATCH_QUIET="1")
    directory.mkdir(parents=True, exist_ok=True)
    with daemon(directory) as (_, url):
        process = subprocess.Popen(
            [sys.executable, "-c", _TRAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdin is not None and process.stdout is not None
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(16):
            process.stdin.write("\n")
            process.stdin.flush()
            scraped = bool(number % 2)
            end = time.monotonic() + 1.9
            while scraped and time.monotonic() < end:
                scrape(url)
                time.sleep(SCRAPE_SECONDS)
            median, slow = process.stdout.readline().split()
            found[scraped].append((float(median), float(slow)))
        process.communicate()
    alone, watched = ([statistics.median(column) for column in zip(*found[way], strict=True)] for way in (False, True))
    return alone[0], alone[1], watched[0], watched[1]


def scrape(url: str) -> float:
    """How long a scrape takes, in seconds."""
    began = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(url + "metrics", headers=_ASKED)) as answer:
        answer.read()
    return time.monotonic() - began


def cpu_seconds(pid: int) -> float:
    """CPU time of another process, threads that ended included, by its own clock (clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


def status(pid: int, field: str) -> int:
    """A number of /proc/PID/status."""
    found = re.search(rf"(?m)^{field}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])
