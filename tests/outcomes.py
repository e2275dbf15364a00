"""What came of a training, as digests that are compared: everything it computed, and the generators' states."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from tests.trainings import Attach, Training


def outcome(training: Training, attach: Attach) -> dict[str, str]:
    """Run it from the same seeds; everything it computed and the generators' states, as digests."""
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    computed = training(attach)
    state: Any = numpy.random.get_state()
    return {
        "computed": digest(computed),
        "torch generator": digest(torch.get_rng_state()),
        "numpy generator": digest([state[0], state[1].tolist(), *state[2:]]),
        "python generator": digest(random.getstate()),
    }


def digest(content: object) -> str:
    """A fingerprint of numbers, to the last bit, in the order they come."""
    hashed = hashlib.sha256()
    for part in _bytes_of(content):
        hashed.update(part)
    return hashed.hexdigest()


def _bytes_of(content: Any) -> Iterator[bytes]:
    if isinstance(content, torch.Tensor):
        yield str((content.dtype, content.shape)).encode()
        yield content.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b""
    elif isinstance(content, dict):
        for key, value in content.items():
            yield str(key).encode()
            yield from _bytes_of(value)
    elif isinstance(content, (list, tuple)):
        yield f"{len(content)} parts".encode()
        for part in content:
            yield from _bytes_of(part)
    else:
        yield repr(content).encode()
