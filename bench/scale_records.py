"""Records of many ranks for the scale bench: a real training's record, told again by every rank.

``python -m bench.scale_records TEMPLATE DIRECTORY RANKS STEPS_A_SECOND`` holds the records of so many ranks and writes
steps into them until its standard input ends.
"""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path

from gpuwatch.expr import series_key
from gpuwatch.layout import RING_ROWS, Column, State, Word
from gpuwatch.reader import Snapshot, read
from gpuwatch.record import RecordWriter

_TRAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import gpuwatch

torch.set_num_threads(1)
layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Linear(16, 64), *layers, nn.Flatten(), nn.Linear(16 * 64, 10))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(1600, 16, 16), torch.randint(0, 10, (1600,)))
loader = DataLoader(data, batch_size=4, num_workers=1, shuffle=True)
gpuwatch.attach(model, loader, name="scale")
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(inputs)
    model.train()
"""


def real_record(directory: Path) -> Path:
    """The record of a real training, made now."""
    environment = dict(os.environ, GPUWATCH_DIR=str(directory), GPUWATCH_DAEMON="0", GPUWATCH_QUIET="1")
    subprocess.run([sys.executable, "-c", _TRAIN], check=True, env=environment)
    return next(directory.glob("*.gpw"))


def retold(template: Snapshot, directory: Path, rank: int, ranks: int) -> RecordWriter:
    """A living record that says what the template says, with a full ring."""
    identity = {**template.identity, "rank": rank, "local_rank": rank, "world_size": ranks}
    writer = RecordWriter(directory, identity)
    for name, labels in template.series:
        writer.values[writer.series(name, **labels)] = template.values.get(series_key(name, labels), float("nan"))
    for seen in template.observations:
        writer.observe(seen.rule, seen.where, seen.evidence, seen.magnitude)
    for number in range(1, RING_ROWS + 1):
        step(writer, template, number)
    writer.words[Word.STATE] = State.RUNNING
    return writer


def step(writer: RecordWriter, template: Snapshot, number: int) -> None:
    """One step more, as long as one of the template's."""
    row = list(random.choice(template.ring))
    row[Column.NUMBER] = number
    row[Column.TOTAL] *= random.uniform(0.95, 1.05)
    writer.step_row(*row)
    writer.words[Word.STEP] = number
    writer.words[Word.STEP_TIME] = writer.words[Word.HEARTBEAT] = time.monotonic_ns()


def main() -> None:
    """Hold the records."""
    template, directory, ranks, rate = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    told = read(template)
    writers = [retold(told, directory, rank, ranks) for rank in range(ranks)]
    print("ready", flush=True)
    number = RING_ROWS
    while not select.select([sys.stdin], [], [], 1 / rate)[0]:
        number += 1
        for writer in writers:
            step(writer, told, number)


if __name__ == "__main__":
    main()
