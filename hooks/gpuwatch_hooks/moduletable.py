"""A model's memory by module: parameters, gradients, optimizer state, and what a forward saved, names folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from gpuwatch_hooks.folding import folded
from gpuwatch_hooks.saved import SavedTensors, storage_of

StateOf = Callable[[torch.Tensor], Iterable[torch.Tensor]]
"""The tensors an optimizer keeps for a parameter."""


@dataclass
class Row:
    """Modules of one folded name. Bytes; ``reached`` is what had been saved in all when the last of them returned."""

    count: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    reached: int = 0

    def total(self) -> int:
        """All its bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Group:
    """Modules that repeat: what all of them saved together, how many there are, the most that one of them saved."""

    name: str
    count: int
    activations: int
    largest: int

    def saving(self) -> int:
        """The most that checkpointing each of them saves: one at a time is computed again."""
        return self.activations - self.largest


def table(roots: Iterable[tuple[torch.nn.Module, SavedTensors | None]], state_of: StateOf) -> dict[str, Row]:
    """Rows by folded name, for the models with their measurements; each storage is counted once."""
    rows: dict[str, Row] = {}
    storages: set[int] = set()
    for root, saved in roots:
        prefix = _wrapper(root) if saved is None else saved.prefix
        device = None if saved is None else saved.device
        for path, module in root.named_modules():
            row = rows.setdefault(_name(path, prefix), Row())
            row.count += 1
            for parameter in module.parameters(recurse=False):
                row.parameters += _bytes([parameter], storages, device)
                if parameter.grad is not None:
                    row.gradients += _bytes([parameter.grad], storages, device)
                row.optimizer += _bytes(state_of(parameter), storages, device)
        if saved is not None:
            for path, size in saved.bytes_by_module.items():
                rows.setdefault(_name(path, prefix), Row(count=1)).activations += size
            for path, reached in saved.reached.items():
                row = rows.setdefault(_name(path, prefix), Row(count=1))
                row.reached = max(row.reached, reached)
    return {name: row for name, row in rows.items() if row.total()}


def repeated(saved: SavedTensors) -> Group | None:
    """The repeated part of the model whose checkpointing saves most; None where nothing repeats."""
    prefix = saved.prefix
    parts: dict[str, dict[str, int]] = {}
    for path, size in saved.bytes_by_module.items():
        words = path.removeprefix(prefix).split(".")
        for end, word in enumerate(words, 1):
            if word.isdecimal():
                one = ".".join(words[:end])
                sizes = parts.setdefault(folded(one), {})
                sizes[one] = sizes.get(one, 0) + size
    groups = [
        Group(name, len(sizes), sum(sizes.values()), max(sizes.values()))
        for name, sizes in parts.items()
        if len(sizes) > 1
    ]
    return max(groups, key=Group.saving, default=None)


def _bytes(tensors: Iterable[torch.Tensor], storages: set[int], device: str | None) -> int:
    size = 0
    for tensor in tensors:
        if tensor.layout != torch.strided or (device is not None and tensor.device.type != device):
            continue
        key = storage_of(tensor)
        if key and key not in storages:
            storages.add(key)
            size += tensor.untyped_storage().nbytes()
    return size


def _wrapper(root: torch.nn.Module) -> str:
    return "module." if isinstance(root, torch.nn.parallel.DistributedDataParallel) else ""


def _name(path: str, prefix: str) -> str:
    return folded(path.removeprefix(prefix)) or "(model)"
