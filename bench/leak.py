"""What watching costs a run that leaks: then the leak is searched for, named, and followed.

Steps of ten milliseconds, most of it a wait (as for a device), so that a busy machine changes little; each keeps a
batch's output and a tensor in a list. All steps are compared, the first ones too, bare and watched in turn; attach
itself, most of it imports, is said apart.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass

STEPS = 2000

_TRAIN = """
import json, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

watched, steps = sys.argv[1] == "watched", int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(torch.randn(8 * steps, 64), torch.randint(0, 10, (8 * steps,))), batch_size=8)

def train(steps, kept):
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        kept.append((torch.ones(64, 256), outputs.detach()))
        time.sleep(0.009)
        if step + 1 == steps:
            break

train(100, [])
if watched:
    import gpuwatch
entered = time.perf_counter()
if watched:
    watch = gpuwatch.attach(model, loader)
began, worked = time.perf_counter(), time.process_time()
train(steps, [])
said = {"seconds": time.perf_counter() - began, "worked": time.process_time() - worked, "attach": began - entered}
if watched:
    watch.detach()
if watched:
    said["named"] = any(finding.rule == "leak-tensors" for finding in watch.findings())
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Ran:
    """A run: seconds of its steps by the clock and by the work done, seconds of attach, whether the leak was named."""

    seconds: float
    worked: float
    attach: float
    named: bool = False


def leak_line(rounds: int) -> str:
    """What watching adds to a run of 2,000 steps of 10 ms that keeps a list of tensors."""
    bare, watched = [], []
    for _ in range(rounds):
        bare.append(_train("bare"))
        watched.append(_train("watched"))
    assert all(run.named for run in watched), "the leak was not named"
    added = [one.seconds - other.seconds for one, other in zip(watched, bare, strict=True)]
    worked = [one.worked - other.worked for one, other in zip(watched, bare, strict=True)]
    usual = statistics.median(run.seconds for run in bare)
    return (
        f"leak: +{100 * statistics.median(added) / usual:.2f} % over {STEPS:,} steps of {1000 * usual / STEPS:.1f} ms "
        f"with a list of tensors that grows ({100 * statistics.median(worked) / usual:+.2f} % by the work done); "
        f"attach {1000 * statistics.median(run.attach for run in watched):.0f} ms   "
        f"[medians of {rounds} pairs of processes]"
    )


def _train(kind: str) -> Ran:
    with tempfile.TemporaryDirectory() as directory:
        environment = dict(os.environ, GPUWATCH_DIR=directory, GPUWATCH_DAEMON="0", GPUWATCH_QUIET="1")
        command = [sys.executable, "-c", _TRAIN, kind, str(STEPS)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return Ran(**json.loads(ran.stdout))
