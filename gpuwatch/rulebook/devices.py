"""Devices that a job leaves idle, or shares between threads."""

from __future__ import annotations

from gpuwatch.catalog import LOCAL_RANKS, USED_GPUS, VISIBLE_GPUS
from gpuwatch.expr import Quantity
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed

_IDLE_GPUS = VISIBLE_GPUS - USED_GPUS * LOCAL_RANKS

RULES = (
    Rule(
        id="dist-dataparallel",
        title="`nn.DataParallel` instead of DistributedDataParallel",
        severity="warn",
        scope="rank",
        when=observed("dist-dataparallel") >= 1,
        value=Quantity("modules", observed("dist-dataparallel"), "count"),
        because=(
            "`nn.DataParallel` copies the model to every device in each step, runs them from threads that share one "
            "interpreter, and gathers outputs and gradients on the first device. On one device, or on the CPU, it does "
            "nothing."
        ),
        evidence="the model holds `nn.DataParallel`",
        fix="Start one process per device with `torchrun --nproc-per-node N train.py` and wrap the model in "
        "`torch.nn.parallel.DistributedDataParallel`, or in `fully_shard` where it does not fit. With one device drop "
        "the wrapper.",
        gain=Gain("the copies, the gather on the first device and the shared interpreter"),
        check="The wrapper is gone, and steps per second rise with the number of devices.",
        techniques=("T13",),
        observed=True,
        examples=(
            Example("the model is wrapped in it", {observation("dist-dataparallel", "DataParallel"): flat(1)}, True),
            Example("it was unwrapped", {observation("dist-dataparallel", "DataParallel"): flat(0)}, False),
        ),
    ),
    Rule(
        id="comp-idle-gpus",
        title="The job leaves GPUs idle",
        severity="info",
        scope="rank",
        when=(_IDLE_GPUS >= 1) & (USED_GPUS > 0),
        hold_minutes=5,
        value=Quantity("idle", _IDLE_GPUS, "count"),
        quantities=(Quantity("visible", VISIBLE_GPUS, "count"), Quantity("ranks", LOCAL_RANKS, "count")),
        because=(
            "The process may use more GPUs than all ranks of this job on this node have allocated memory on. Others "
            "may use them: the hardware dashboard tells."
        ),
        evidence="of {visible} visible GPUs this job leaves {idle} alone ({ranks} ranks on this node)",
        fix="Use them: `torchrun --nproc-per-node` with DistributedDataParallel, or `fully_shard`. Or leave them to "
        "others: ask the scheduler for fewer, or set `CUDA_VISIBLE_DEVICES`.",
        gain=Gain("up to as many times the throughput as there are GPUs"),
        check="Every visible GPU has memory of this job.",
        techniques=("T13", "T18"),
        examples=(
            Example(
                "one of four in use",
                {VISIBLE_GPUS.name: flat(4), USED_GPUS.name: flat(1), LOCAL_RANKS.name: flat(1)},
                True,
            ),
            Example(
                "two ranks on two of them",
                {VISIBLE_GPUS.name: flat(2), USED_GPUS.name: flat(1), LOCAL_RANKS.name: flat(2)},
                False,
            ),
            Example(
                "one process on all of them",
                {VISIBLE_GPUS.name: flat(4), USED_GPUS.name: flat(4), LOCAL_RANKS.name: flat(1)},
                False,
            ),
            Example(
                "none in use yet",
                {VISIBLE_GPUS.name: flat(2), USED_GPUS.name: flat(0), LOCAL_RANKS.name: flat(1)},
                False,
            ),
        ),
    ),
)
