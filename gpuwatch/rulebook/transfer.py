"""The way to the device, and what is carried that nobody needs."""

from __future__ import annotations

from gpuwatch.catalog import BATCH_PINNED, LOADER_BATCH_BYTES, LOADER_PART_SECONDS, PADDING, WINDOW_STEP_SECONDS
from gpuwatch.expr import Quantity, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed
from gpuwatch.rulebook.waiting import MEDIAN_STEP, MEDIAN_STEP_KEY

MIB = 1 << 20

COPY = LOADER_PART_SECONDS.where(part="copy")
COPY_SHARE = COPY / MEDIAN_STEP
LARGE = LOADER_BATCH_BYTES >= MIB

_BYTES = Quantity("bytes", LOADER_BATCH_BYTES, "bytes")
_COPY = Quantity("copy", COPY, "seconds")
_NOT_VERIFIED = "Written from torch's documented interface; the measurement was not verified on a device."


def _copied(seconds: float, pinned: float, size: float = 48 * MIB) -> dict[str, tuple[float, ...]]:
    """Batches that take so long to copy, in steps of 100 ms."""
    return {
        series_key(LOADER_PART_SECONDS.name, {"part": "copy"}): flat(seconds),
        series_key(LOADER_PART_SECONDS.name, {"part": "items"}): flat(0.3),
        MEDIAN_STEP_KEY: flat(0.1),
        series_key(WINDOW_STEP_SECONDS.name, {"quantile": "0.99"}): flat(0.2),
        BATCH_PINNED.name: flat(pinned),
        LOADER_BATCH_BYTES.name: flat(size),
    }


RULES = (
    Rule(
        id="data-h2d-pageable",
        title="Batches are copied to the device from pageable memory",
        severity="warn",
        scope="rank",
        when=BATCH_PINNED.equals(0) & LARGE & (COPY_SHARE >= 0.05),
        hold_minutes=2,
        value=Quantity("share", COPY_SHARE, "ratio"),
        quantities=(_BYTES, _COPY),
        because=(
            "The device cannot read pageable memory itself: the driver copies the batch to a buffer of its own, piece "
            "by piece, while the training thread waits. From pinned memory the copy is one transfer, and the program "
            "goes on meanwhile. The time is that of the device's clock, from the batch's arrival to the forward, and "
            "counts only where it is what a copy of that size takes."
        ),
        evidence="batches of {bytes} are not pinned, and copying one takes {copy}, {share} of a step",
        fix="Pass `pin_memory=True` to the DataLoader and copy with `batch.to(device, non_blocking=True)`. Measure it: "
        "pinning costs a thread and host memory.",
        gain=Gain("at most the time of the copy", removable=COPY_SHARE),
        check='`gpuwatch_loader_batch_part_seconds{part="copy"}` falls.',
        techniques=("T02",),
        notes=_NOT_VERIFIED,
        examples=(
            Example("large images from pageable memory", _copied(0.02, 0), True),
            Example("large images from pinned memory", _copied(0.02, 1), False),
            Example("a copy that is lost in the step", _copied(0.002, 0), False),
            Example("a row of labels", _copied(0.02, 0, 4096), False),
        ),
    ),
    Rule(
        id="data-h2d-blocking",
        title="The training thread waits for the copy of each batch",
        severity="warn",
        scope="rank",
        when=(observed("data-h2d-blocking") >= 0.8) & BATCH_PINNED.equals(1) & LARGE,
        value=Quantity("share", observed("data-h2d-blocking"), "ratio"),
        quantities=(_BYTES, _COPY),
        because=(
            "Batches are in pinned memory, and still the device had nothing left to do when the forward began, though "
            "it was behind when the batch came, and the time between is that of a copy: `.to(device)` without "
            "`non_blocking=True` waits for the copy and for all work before it."
        ),
        evidence="in {share} of the steps looked at, the device was idle when the copy of {bytes} was done; the copy "
        "takes {copy}",
        fix="Copy with `batch.to(device, non_blocking=True)`; to hide the copy as well, start that of the next batch "
        "on a side stream (`torch.cuda.Stream`) before the step.",
        gain=Gain("the program runs ahead of the device again", removable=COPY_SHARE),
        check="`gpuwatch_device_done_early_ratio` and the step time fall.",
        techniques=("T02", "T31"),
        notes=_NOT_VERIFIED,
        observed=True,
        examples=(
            Example(
                "pinned, but waited for",
                {observation("data-h2d-blocking", ""): flat(0.95), BATCH_PINNED.name: flat(1),
                 LOADER_BATCH_BYTES.name: flat(48 * MIB)},
                True,
            ),
            Example(
                "not waited for",
                {observation("data-h2d-blocking", ""): flat(0.1), BATCH_PINNED.name: flat(1),
                 LOADER_BATCH_BYTES.name: flat(48 * MIB)},
                False,
            ),
            Example(
                "pageable",
                {observation("data-h2d-blocking", ""): flat(0.95), BATCH_PINNED.name: flat(0),
                 LOADER_BATCH_BYTES.name: flat(48 * MIB)},
                False,
            ),
            Example(
                "a few labels",
                {observation("data-h2d-blocking", ""): flat(0.95), BATCH_PINNED.name: flat(1),
                 LOADER_BATCH_BYTES.name: flat(4096)},
                False,
            ),
        ),
    ),
    Rule(
        id="data-padding-waste",
        title="Much of each batch is padding",
        severity="info",
        scope="rank",
        when=PADDING >= 0.30,
        hold_minutes=2,
        value=Quantity("padding", PADDING, "ratio"),
        because=(
            "The batches' `attention_mask` marks the tokens that are real; the rest is computed on and thrown away. "
            "Where there is none, rows of ids tell: they end (or begin) in runs of one value that is hardly anywhere "
            "else. Read on the CPU, at steps that are looked at, before the batch goes to the device."
        ),
        evidence="{padding} of the tokens of a batch are padding (median)",
        fix="Put sequences of like length into a batch (a length-bucketing sampler, `group_by_length=True`), pad to "
        "the longest of the batch instead of a fixed length, or pack them (`torch.nn.attention.varlen.varlen_attn`, "
        "`flex_attention` with a document mask).",
        gain=Gain("where the work grows with the tokens, that share of it", removable=PADDING),
        check="`gpuwatch_loader_padding_ratio` falls below 0.3.",
        techniques=("T27",),
        examples=(
            Example("padded to a fixed length", {PADDING.name: flat(0.62)}, True),
            Example("bucketed by length", {PADDING.name: flat(0.06)}, False),
        ),
    ),
)  # fmt: skip
