"""What watching takes besides time: memory, growth over a long run, the import."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

IMPORT_RUNS = 11
MEMORY_RUNS = 5

_TRAIN = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

watched, steps = sys.argv[1] == "watched", int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(1000, 4)), batch_size=1)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def train(steps):
    done = 0
    while done < steps:
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            done += 1
            if done >= steps:
                break

train(200)
before = resident()
if watched:
    import gpuwatch

    gpuwatch.attach(model, loader)
readings = []
for _ in range(10):
    train(steps // 10)
    readings.append(resident())
print(json.dumps({"before": before, "readings": readings}))
"""


def import_line() -> str:
    """How long ``import gpuwatch`` takes, without the interpreter's own start."""
    nothing = [_seconds("pass") for _ in range(IMPORT_RUNS)]
    package = [_seconds("import gpuwatch") for _ in range(IMPORT_RUNS)]
    added = statistics.median(package) - statistics.median(nothing)
    return f"import: `import gpuwatch` {1000 * added:.1f} ms   [medians of {IMPORT_RUNS}]"


def memory_line() -> str:
    """Resident memory that watching adds to the same training, after 2,000 steps."""
    bare = statistics.median(_train("bare", 2000)["readings"][-1] for _ in range(MEMORY_RUNS))
    watched = statistics.median(_train("watched", 2000)["readings"][-1] for _ in range(MEMORY_RUNS))
    return (
        f"memory: resident {watched / 2**20:.1f} MiB watched, {bare / 2**20:.1f} MiB bare: "
        f"+{(watched - bare) / 2**20:.1f} MiB   [medians of {MEMORY_RUNS} processes, 2,000 steps]"
    )


def growth_line(steps: int) -> str:
    """How much the resident memory of a long watched run grows between its first tenth and its end."""
    readings = _train("watched", steps)["readings"]
    return f"growth: resident {(readings[-1] - readings[0]) / 1024:+.0f} KiB from step {steps // 10:,} to {steps:,}"


def _seconds(code: str) -> float:
    timing = f"import time; began = time.perf_counter(); exec({code!r}); print(time.perf_counter() - began)"
    return float(subprocess.run([sys.executable, "-c", timing], capture_output=True, text=True, check=True).stdout)


def _train(kind: str, steps: int) -> dict[str, list[int]]:
    with tempfile.TemporaryDirectory() as directory:
        environment = dict(os.environ, GPUWATCH_DIR=directory, GPUWATCH_DAEMON="0", GPUWATCH_QUIET="1")
        command = [sys.executable, "-c", _TRAIN, kind, str(steps)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        result: dict[str, list[int]] = json.loads(ran.stdout)
        return result
