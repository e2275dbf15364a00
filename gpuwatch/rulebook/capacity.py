"""Memory of the accelerator: how full it is, and who else is on it."""

from __future__ import annotations

from gpuwatch.catalog import (
    DEVICE_ACTIVE_PEAK,
    DEVICE_CAPACITY,
    DEVICE_DONE_EARLY,
    DEVICE_NOT_TORCH,
    DEVICE_RESERVED,
    DEVICE_STEP_ACTIVE,
    GPU_FOREIGN_MEMORY,
    GPU_MEMORY_TOTAL,
    LOADER_BATCH,
    MODEL_MEMORY,
)
from gpuwatch.expr import Expr, Quantity, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, one_minus

GIB = 1 << 30
_CAP = 80 * GIB

PEAK_SHARE = DEVICE_ACTIVE_PEAK / DEVICE_CAPACITY
STEP_SHARE = DEVICE_STEP_ACTIVE / DEVICE_CAPACITY

STATIC: Expr = (
    MODEL_MEMORY.where(part="parameters") + MODEL_MEMORY.where(part="gradients") + MODEL_MEMORY.where(part="optimizer")
)
"""Bytes that are there at every point of the step: parameters, gradients and optimizer state."""

# What grows with the batch may fill 85 % of the device, less what does not.
_LARGER = (DEVICE_CAPACITY * 0.85 - STATIC) / (DEVICE_ACTIVE_PEAK - STATIC)


def part(name: str) -> str:
    """Series key of a part of the models' memory."""
    return series_key(MODEL_MEMORY.name, {"part": name})


def _device(peak: float, step: float | None = None) -> dict[str, tuple[float, ...]]:
    """A device of 80 GiB with these shares of it at the peak so far and at the start of recent backwards."""
    return {
        DEVICE_CAPACITY.name: flat(_CAP),
        DEVICE_ACTIVE_PEAK.name: flat(peak * _CAP),
        DEVICE_STEP_ACTIVE.name: flat((peak if step is None else step) * _CAP),
    }


def _idle(peak: float, done: float, capacity: float = _CAP) -> dict[str, tuple[float, ...]]:
    return {
        DEVICE_CAPACITY.name: flat(capacity),
        DEVICE_ACTIVE_PEAK.name: flat(peak * capacity),
        DEVICE_DONE_EARLY.name: flat(done),
        part("parameters"): flat(2 * GIB),
        part("gradients"): flat(2 * GIB),
        part("optimizer"): flat(4 * GIB),
        LOADER_BATCH.name: flat(32),
    }


def _beside(used: float, capacity: float = _CAP) -> dict[str, tuple[float, ...]]:
    return {DEVICE_NOT_TORCH.name: flat(used), DEVICE_CAPACITY.name: flat(capacity)}


RULES = (
    Rule(
        id="mem-near-capacity",
        title="The step's memory nearly fills the device",
        severity="warn",
        scope="rank",
        # A single peak may be cuDNN trying out workspaces: the start of recent backwards must be high as well.
        when=(PEAK_SHARE >= 0.92) & (STEP_SHARE >= 0.80),
        critical_when=(PEAK_SHARE >= 0.97) & (STEP_SHARE >= 0.90),
        hold_minutes=2,
        value=Quantity("peak", PEAK_SHARE, "ratio"),
        quantities=(
            Quantity("active", DEVICE_ACTIVE_PEAK, "bytes"),
            Quantity("capacity", DEVICE_CAPACITY, "bytes"),
        ),
        because=(
            "It is the peak of memory in use (active bytes) against what this process may have. The allocator's cache "
            "does not count: a full cache is healthy."
        ),
        evidence="the peak of live memory is {active} of {capacity}, {peak}",
        fix="Use a smaller micro-batch with gradient accumulation, checkpoint activations, or shard the model "
        "(`torch.distributed.fsdp.fully_shard`); a longer input or a larger batch may not fit.",
        gain=Gain("no out-of-memory error at the next larger batch"),
        check="The peak of active bytes stays below 90 % of the capacity.",
        techniques=("T10", "T14", "T15"),
        examples=(
            Example("nearly full at every step", _device(0.94, 0.88), True),
            Example("full to the brim", _device(0.985, 0.95), True, severity="critical"),
            Example("three quarters full", _device(0.75), False),
            Example("one peak at the start", _device(0.96, 0.40), False),
            Example("one peak to the brim, full steps", _device(0.985, 0.85), True),
            Example(
                "a full cache",
                {**_device(0.5), DEVICE_RESERVED.name: flat(0.98 * _CAP)},
                False,
            ),
        ),
    ),
    Rule(
        id="mem-headroom-unused",
        title="Half of the device's memory is never used, and the device waits for the program",
        severity="info",
        scope="rank",
        when=(PEAK_SHARE < 0.50) & (DEVICE_DONE_EARLY >= 0.80) & (DEVICE_CAPACITY >= 4 * GIB),
        hold_minutes=5,
        value=Quantity("headroom", one_minus(PEAK_SHARE), "ratio"),
        quantities=(
            Quantity("factor", _LARGER, "count"),
            Quantity("batch", LOADER_BATCH, "count"),
            Quantity("proposed", LOADER_BATCH * _LARGER, "count"),
            Quantity("done", DEVICE_DONE_EARLY, "ratio"),
        ),
        because=(
            "The device has done its work before the program has asked for the next step in most steps, so overhead "
            "per step limits the speed, and a larger batch would share it out. What fits is worked out from the peak: "
            "parameters, gradients and optimizer state stay, the rest grows with the batch, up to 85 % of the device."
        ),
        evidence=(
            "{headroom} of the memory is free even at the peak, and the device was done early in {done} of steps; "
            "about {factor} times the batch fits: {proposed} items instead of {batch}"
        ),
        fix="Raise the batch towards the size in the evidence, in steps, and scale the learning rate with it.",
        gain=Gain("the fixed cost of a step is shared by more items"),
        check="Items per second rise; the peak stays below 85 % of the capacity.",
        techniques=("T35",),
        examples=(
            Example("a small batch on a large device", _idle(0.2, 1.0), True),
            Example("a small batch that keeps the device busy", _idle(0.2, 0.1), False),
            Example("a device that is used", _idle(0.7, 1.0), False),
            Example("a small device", _idle(0.2, 1.0, 2 * GIB), False),
        ),
    ),
    Rule(
        id="mem-non-torch",
        title="Much of the device's memory is not in PyTorch's cache",
        severity="warn",
        scope="rank",
        when=(DEVICE_NOT_TORCH >= 3 * GIB) & (DEVICE_NOT_TORCH / DEVICE_CAPACITY >= 0.10),
        hold_minutes=5,
        value=Quantity("other", DEVICE_NOT_TORCH, "bytes"),
        quantities=(Quantity("capacity", DEVICE_CAPACITY, "bytes"),),
        because=(
            "The driver says how much of the device is in use by anybody; what this process's caching allocator has "
            "reserved is taken off. CUDA contexts, NCCL's and cuBLAS's buffers, other libraries and other processes "
            "are left. A context and NCCL's usual buffers stay below the limit."
        ),
        evidence="{other} of {capacity} is in use outside of this process's PyTorch cache",
        fix="See `nvidia-smi` for other processes (a notebook, an old run); with one process a GPU, look at "
        "`NCCL_BUFFSIZE` and the number of process groups, `CUBLAS_WORKSPACE_CONFIG`, and libraries with pools of "
        "their own (RAPIDS, JAX, TensorRT).",
        gain=Gain("up to that much more memory for the model"),
        check="`gpuwatch_device_memory_not_torch_bytes` falls to a GiB or two.",
        examples=(
            Example("a notebook beside it", _beside(20 * GIB), True),
            Example("a context and NCCL", _beside(2 * GIB), False),
            Example("five GiB on a very large device", _beside(5 * GIB, 180 * GIB), False),
            Example("a tenth of a small device", _beside(2 * GIB, 16 * GIB), False),
        ),
    ),
    Rule(
        id="mem-foreign-process",
        title="A process of no watched run holds memory on this GPU",
        severity="warn",
        scope="gpu",
        when=(GPU_FOREIGN_MEMORY >= GIB) & (GPU_FOREIGN_MEMORY / GPU_MEMORY_TOTAL >= 0.02),
        hold_minutes=5,
        value=Quantity("foreign", GPU_FOREIGN_MEMORY, "bytes"),
        quantities=(Quantity("total", GPU_MEMORY_TOTAL, "bytes"),),
        because=(
            "NVML names the compute processes of each GPU and their memory. Those that are neither a watched rank nor "
            "a child of one are counted, on GPUs where a watched rank is among them: elsewhere, and in containers "
            "that number their processes apart, it cannot be told whose they are."
        ),
        evidence="processes that belong to no watched run hold {foreign} of {total}",
        fix="`nvidia-smi --query-compute-apps=pid,used_memory,process_name --format=csv` names them: end what is left "
        "over from an earlier run, or move one of the two.",
        gain=Gain("that much more memory, and no competition for the GPU"),
        check="`nvidia-smi` lists the run's own processes alone.",
        techniques=("T18",),
        examples=(
            Example(
                "a forgotten notebook",
                {GPU_FOREIGN_MEMORY.name: flat(9 * GIB), GPU_MEMORY_TOTAL.name: flat(_CAP)},
                True,
            ),
            Example(
                "a desktop's compositor",
                {GPU_FOREIGN_MEMORY.name: flat(0.4 * GIB), GPU_MEMORY_TOTAL.name: flat(16 * GIB)},
                False,
            ),
            Example(
                "a small process on a large device",
                {GPU_FOREIGN_MEMORY.name: flat(1.2 * GIB), GPU_MEMORY_TOTAL.name: flat(_CAP)},
                False,
            ),
            Example(
                "alone",
                {GPU_FOREIGN_MEMORY.name: flat(0), GPU_MEMORY_TOTAL.name: flat(_CAP)},
                False,
            ),
        ),
    ),
)
