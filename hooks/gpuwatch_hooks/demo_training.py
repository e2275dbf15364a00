"""What ``gpuwatch demo`` trains: a small character-level transformer, with faults planted on purpose.

This is a training script as a user has one: of gpuwatch it knows the attach line, and the faults are ordinary code.
``gpuwatch demo`` runs a copy of it, so that its frames count as the user's and findings name its lines. The text is
that of Python's own manual topics.
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import time
from collections.abc import Mapping, Sequence
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gpuwatch

FAULTS = ("anomaly", "workers", "validation", "losses", "zeros")

CONTEXT = 32
BATCH = 8
CANDIDATES = 4
WINDOW = 512
STORAGE_SECONDS = 0.001
"""What a read of one item takes, as from storage that is not in this machine."""


class Passages(Dataset[list[int]]):
    """Passages of the text, each read from slow storage: of some candidates the most varied one."""

    def __init__(self, text: str, codes: Mapping[str, int], length: int) -> None:
        self.text = text
        self.codes = codes
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[int]:
        time.sleep(STORAGE_SECONDS)
        chance = random.Random(index)
        starts = [chance.randrange(len(self.text) - WINDOW) for _ in range(CANDIDATES)]
        best = max((cleaned(self.text[start : start + WINDOW]) for start in starts), key=variety)
        return [self.codes[letter] for letter in best[: CONTEXT + 1].ljust(CONTEXT + 1)]


def cleaned(passage: str) -> str:
    """The passage without runs of spaces."""
    kept = [letter for before, letter in zip(" " + passage, passage, strict=False) if not before == letter == " "]
    return "".join(kept)


def variety(passage: str) -> float:
    """Entropy of the passage's letters, in bits."""
    counts = collections.Counter(letter for letter in passage.lower() if not letter.isspace())
    total = sum(counts.values()) or 1
    return -sum(count / total * math.log2(count / total) for count in counts.values())


class CharacterModel(nn.Module):
    """A decoder of one layer over characters."""

    def __init__(self, letters: int, width: int = 96, heads: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Scores for the next letter at every place."""
        hidden = self.layers(self.letters(codes) + self.places, mask=self.mask, is_causal=True)
        scores: torch.Tensor = self.head(hidden)
        return scores


def train(steps: int, faults: Sequence[str], name: str | None) -> float:
    """Train for so many steps; returns the loss of the last one."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = "\n".join(topics[topic] for topic in sorted(topics))
    codes = {letter: code for code, letter in enumerate(sorted(set(text)))}
    split = len(text) * 9 // 10
    training = Passages(text[:split], codes, steps * BATCH)
    # Batches are plain lists: a worker hands tensors over in shared memory, which costs more than so few numbers.
    if "workers" in faults:
        loader = DataLoader(training, BATCH, collate_fn=list)
    else:
        loader = DataLoader(training, BATCH, collate_fn=list, num_workers=2, persistent_workers=True)
    held_out = list(DataLoader(Passages(text[split:], codes, 4 * BATCH), BATCH, collate_fn=list))
    model = CharacterModel(len(codes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.autograd.set_detect_anomaly("anomaly" in faults)
    gpuwatch.attach(model, loader, name=name)

    losses: list[torch.Tensor | float] = []
    for step, batch in enumerate(loader, 1):
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none="zeros" not in faults)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss if "losses" in faults else loss.item())
        if step % (steps // 5 or 1) == 0:
            with torch.set_grad_enabled("validation" in faults):
                validate(model, held_out)
    return loss.item()


def validate(model: nn.Module, batches: Sequence[list[list[int]]]) -> float:
    """The mean loss on the held-out passages."""
    model.eval()
    losses = [loss_of(model, batch) for batch in batches]
    model.train()
    return sum(loss.item() for loss in losses) / len(losses)


def loss_of(model: nn.Module, batch: list[list[int]]) -> torch.Tensor:
    """Cross entropy of the next letter."""
    passages = torch.tensor(batch)
    return nn.functional.cross_entropy(model(passages[:, :-1]).flatten(0, 1), passages[:, 1:].flatten())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--name")
    parser.add_argument("--without", action="append", default=[], choices=FAULTS, metavar="FAULT")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if fault not in arguments.without]
    print(f"last loss {train(arguments.steps, faults, arguments.name):.6f}")


if __name__ == "__main__":
    main()
