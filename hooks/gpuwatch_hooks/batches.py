"""What is in the batches that come, seen at some of the fetches that are looked at: bytes, pinned or not, padding."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from gpuwatch.catalog import BATCH_PINNED, LOADER_BATCH_BYTES, PADDING
from gpuwatch_hooks.holdings import attributes_of
from gpuwatch_hooks.padding import padding_of_ids

KEPT = 32
SAMPLE_EVERY = 4
"""Looked-at batches of which one is measured."""

MOST_TENSORS = 64
DEEPEST = 4
MASK = "attention_mask"
MASK_KINDS = (torch.bool, torch.int64, torch.int32, torch.uint8)
MOST_MASKED = 1 << 20
"""Elements of a mask beyond which it is not summed up."""

SOME_PADDING = 0.01


class Batches:
    """The batches of one loader."""

    def __init__(self) -> None:
        self._seen = 0
        self._bytes: deque[int] = deque(maxlen=KEPT)
        self._padding: deque[float] = deque(maxlen=KEPT)
        self._pinned: bool | None = None
        self._masked = False  # an attention mask was seen

    def look(self, batch: object, on_accelerator: bool) -> None:
        """A batch came."""
        self._seen += 1
        if self._seen % SAMPLE_EVERY != 1 or overheard():
            return
        tensors = list(_tensors(batch))
        if not tensors:
            return
        with torch._C.DisableTorchFunctionSubclass():
            self._bytes.append(sum(_size(tensor) for tensor in tensors))
            if on_accelerator:
                self._pinned = all(tensor.is_pinned() for tensor in tensors if tensor.device.type == "cpu")
            share = padding(batch)
            self._masked = self._masked or share is not None
            share = padding_of_ids(tensors) if share is None else share
        if share is not None:
            self._padding.append(share)

    def readings(self) -> Iterator[tuple[str, float]]:
        """Its gauges, without those that are not known."""
        if self._bytes:
            yield LOADER_BATCH_BYTES.name, statistics.median(self._bytes)
        if self._pinned is not None:
            yield BATCH_PINNED.name, float(self._pinned)
        # Ids that are never padded may be no ids: of them nothing is said.
        if self._padding and (self._masked or max(self._padding) >= SOME_PADDING):
            yield PADDING.name, statistics.median(self._padding)


def overheard() -> bool:
    """Whether a mode of the user's would see what is asked of a tensor here."""
    return torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.layout == torch.strided else 0


def padding(batch: object) -> float | None:
    """Share of a batch that its attention mask leaves out; None where it has none of the usual form."""
    mask = _mask(batch)
    if not issubclass(type(mask), torch.Tensor) or mask.device.type != "cpu" or mask.dtype not in MASK_KINDS:
        return None
    if mask.dim() != 2 or not 0 < mask.numel() <= MOST_MASKED:
        return None
    return 1.0 - int(torch.count_nonzero(mask)) / int(mask.numel())


def _mask(batch: Any, depth: int = 2) -> Any:
    kind = type(batch)
    if issubclass(kind, dict):
        return dict.get(batch, MASK)
    if issubclass(kind, (tuple, list)) and depth:
        return next((mask for part in batch[:2] if (mask := _mask(part, depth - 1)) is not None), None)
    inner = _inner(batch)
    return None if inner is None else dict.get(inner, MASK)


def _inner(item: object) -> dict[Any, Any] | None:
    """The dict of an object that keeps its parts in one, as ``collections.UserDict`` does."""
    inner = attributes_of(item).get("data") if not issubclass(type(item), torch.Tensor) else None
    return inner if issubclass(type(inner), dict) else None  # type: ignore[return-value]


def _tensors(batch: object) -> Iterator[torch.Tensor]:
    """The tensors of a batch: in tuples, lists, dicts, and objects that keep a dict of them."""
    stack: list[tuple[Any, int]] = [(batch, DEEPEST)]
    found = 0
    while stack and found < MOST_TENSORS:
        item, left = stack.pop()
        kind = type(item)
        parts: list[Any] = []
        if issubclass(kind, torch.Tensor):
            found += 1
            yield item
        elif issubclass(kind, (tuple, list)):
            parts = list(item[:MOST_TENSORS])
        elif issubclass(kind, dict):
            parts = list(dict.values(item))[:MOST_TENSORS]
        elif (inner := _inner(item)) is not None:
            parts = [inner]
        if left:
            stack.extend((part, left - 1) for part in parts)
