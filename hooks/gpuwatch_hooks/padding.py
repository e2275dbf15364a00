"""Padding in batches without an attention mask: rows of ids that end, or begin, in runs of one value.

A tensor of integers may be anything: pixels, counts, classes. For padding is taken only a value that stands at one end
of rows in runs of different lengths and hardly anywhere else, among many other values, in what is most of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

KINDS = (torch.int64, torch.int32)
FEWEST_COLUMNS = 16
FEWEST_VALUES = 17
"""Different ids besides that of the padding, below which they are classes or flags."""

COUNTED = 1024
"""Ids of which it is counted how many are different."""

ELSEWHERE = 0.01
"""Share of the other ids that may be the padding's too: the end of a text is, where that is used to pad."""

MOST_ROWS = 64
MOST_COLUMNS = 1 << 14
MOST_ELEMENTS = 1 << 13
"""Ids that are looked at, unless two rows have more."""


def padding_of_ids(tensors: Sequence[torch.Tensor]) -> float | None:
    """Share of the ids of a batch that is padding; None where it is not mostly ids, or none can be told from others."""
    ids = [tensor for tensor in tensors if _may_be_ids(tensor)]
    if 2 * sum(tensor.numel() for tensor in ids) < sum(tensor.numel() for tensor in tensors):
        return None
    known = [(runs, tensor.numel()) for tensor in map(_sample, ids) if (runs := padded(tensor)) is not None]
    return sum(runs for runs, _ in known) / sum(size for _, size in known) if known else None


def padded(ids: torch.Tensor) -> int | None:
    """How many of these ids, row by row, are padding; None where they do not look like ids."""
    ends = [runs for rows in (ids, ids.flip(1)) if (runs := _runs(rows)) is not None]
    return max(ends) if ends else None


def _may_be_ids(tensor: torch.Tensor) -> bool:
    # Of no other class: what stands for a tensor may have no values.
    usual = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not usual or tensor.dtype not in KINDS or tensor.dim() != 2:
        return False
    return tensor.shape[0] > 1 and FEWEST_COLUMNS <= tensor.shape[1] <= MOST_COLUMNS


def _sample(ids: torch.Tensor) -> torch.Tensor:
    """Some of its rows, spread evenly."""
    rows = max(2, min(MOST_ROWS, MOST_ELEMENTS // ids.shape[1]))
    return ids[:: -(-ids.shape[0] // rows)]


def _runs(ids: torch.Tensor) -> int | None:
    """Ids in runs of one value at the ends of rows, the same value in all of them."""
    other = ids != ids[:, -1].mode().values
    columns = torch.arange(1, ids.shape[1] + 1, device="cpu")
    lengths = (other * columns).amax(dim=1)  # of the rows, without a run
    kept = int(lengths.sum())
    if kept - int(torch.count_nonzero(other)) > ELSEWHERE * kept:
        return None
    different = ids[other][:COUNTED].unique()  # type: ignore[no-untyped-call]
    if different.numel() < FEWEST_VALUES:
        return None
    return ids.numel() - kept if int(lengths.min()) < int(lengths.max()) else 0
