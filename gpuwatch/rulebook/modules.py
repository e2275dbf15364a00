"""What a model's memory is made of: activations, optimizer state, copies that need not be."""

from __future__ import annotations

from gpuwatch.catalog import DEVICE_ACTIVE_PEAK, DEVICE_CAPACITY, MODEL_MEMORY
from gpuwatch.expr import Quantity
from gpuwatch.rulebook.capacity import PEAK_SHARE, STATIC, part
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, observation, observed

GIB = 1 << 30
_CAP = 80 * GIB
_ACTIVATIONS = MODEL_MEMORY.where(part="activations")
_STATE = MODEL_MEMORY.where(part="optimizer")
_FULL = PEAK_SHARE >= 0.85


def _model(
    peak: float, activations: float, weights: float, state: float, capacity: float = _CAP
) -> dict[str, tuple[float, ...]]:
    """A device with this peak, and a model with these bytes: the weights once more as gradients."""
    return {
        DEVICE_ACTIVE_PEAK.name: flat(peak),
        DEVICE_CAPACITY.name: flat(capacity),
        part("activations"): flat(activations),
        part("parameters"): flat(weights),
        part("gradients"): flat(weights),
        part("optimizer"): flat(state),
    }


def _gib(peak: float, activations: float, weights: float, state: float) -> dict[str, tuple[float, ...]]:
    return _model(peak * GIB, activations * GIB, weights * GIB, state * GIB)


RULES = (
    Rule(
        id="mem-activation-dominant",
        title="Most of a nearly full device is what the forward saves for backward",
        severity="warn",
        scope="rank",
        when=(_ACTIVATIONS / DEVICE_ACTIVE_PEAK >= 0.60) & _FULL,
        hold_minutes=2,
        value=Quantity("share", _ACTIVATIONS / DEVICE_ACTIVE_PEAK, "ratio"),
        quantities=(
            Quantity("activations", _ACTIVATIONS, "bytes"),
            Quantity("peak", DEVICE_ACTIVE_PEAK, "bytes"),
        ),
        because=(
            "Distinct storages that autograd kept in one forward of the model, parameters and buffers left out, "
            "against the peak of memory in use. The report's table names the modules."
        ),
        evidence="{activations} of the peak of {peak} is saved for backward",
        fix="Checkpoint the repeated part: `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`, or save "
        "chosen operations alone with `create_selective_checkpoint_contexts`.",
        gain=Gain("memory, at the price of one more forward of that part"),
        check="The bytes saved for backward fall in the table of modules.",
        suppresses=("mem-near-capacity",),
        techniques=("T10", "T28"),
        examples=(
            Example("deep blocks", _gib(72, 50, 4, 8), True),
            Example("deep blocks on an empty device", _gib(40, 30, 2, 4), False),
            Example("a large model on a full device", _gib(72, 10, 5, 50), False),
        ),
    ),
    Rule(
        id="mem-state-dominant",
        title="Most of a nearly full device is parameters, gradients and optimizer state",
        severity="warn",
        scope="rank",
        when=(STATIC / DEVICE_ACTIVE_PEAK >= 0.60) & _FULL,
        hold_minutes=2,
        value=Quantity("share", STATIC / DEVICE_ACTIVE_PEAK, "ratio"),
        quantities=(
            Quantity("state", _STATE, "bytes"),
            Quantity("all", STATIC, "bytes"),
            Quantity("peak", DEVICE_ACTIVE_PEAK, "bytes"),
        ),
        because=(
            "These bytes are there at every point of the step, whatever the batch: distinct storages of parameters, "
            "their gradients and what the optimizer keeps for each. Adam in float32 takes 16 bytes a parameter."
        ),
        evidence="{all} of the peak of {peak} is there whatever the batch, {state} of it optimizer state",
        fix="On several GPUs shard it: `torch.distributed.fsdp.fully_shard`, or `ZeroRedundancyOptimizer`. On one, use "
        "an optimizer with small state (8-bit, factored) or parameters in bfloat16.",
        gain=Gain("with full sharding that memory divided by the number of ranks"),
        check="The table of modules shows less optimizer state.",
        suppresses=("mem-near-capacity",),
        techniques=("T14", "T16", "T28"),
        examples=(
            Example("a large model", _gib(72, 10, 15, 30), True),
            Example(
                "the same on a device twice as large", _model(72 * GIB, 10 * GIB, 15 * GIB, 30 * GIB, 2 * _CAP), False
            ),
            Example("a small model with large batches", _gib(72, 50, 4, 8), False),
        ),
    ),
    Rule(
        id="opt-state-precision",
        title="The optimizer's state is a large part of the memory",
        severity="info",
        scope="rank",
        when=(_STATE / DEVICE_ACTIVE_PEAK >= 0.40) & (_STATE >= GIB) & (PEAK_SHARE >= 0.50),
        hold_minutes=2,
        value=Quantity("share", _STATE / DEVICE_ACTIVE_PEAK, "ratio"),
        quantities=(Quantity("state", _STATE, "bytes"),),
        because=(
            "Adam keeps two float32 numbers for each parameter. Where they are 40 % of the peak on a device that is "
            "at least half full, an optimizer with smaller state makes room. A nearly empty device has no use for it."
        ),
        evidence="{state} of optimizer state is {share} of the peak",
        fix="Try 8-bit states (`torchao.optim.AdamW8bit`), a factored optimizer (`torch.optim.Adafactor`), or on "
        "several GPUs `ZeroRedundancyOptimizer`.",
        gain=Gain("up to three quarters of the state's bytes"),
        check="The table of modules shows less optimizer state, and the loss goes on as before.",
        techniques=("T16",),
        examples=(
            Example("Adam on a large model", _gib(60, 5, 13, 28), True),
            Example("Adam on a large model, on an empty device", _gib(36, 2, 8, 16), False),
            Example("SGD with momentum", _gib(60, 25, 11, 11), False),
            Example("a small device", _model(2.2 * GIB, 1.1 * GIB, 0.1 * GIB, 0.9 * GIB, 4 * GIB), False),
        ),
    ),
    Rule(
        id="mem-inplace-activation",
        title="Activation functions keep their input beside their output",
        severity="info",
        scope="rank",
        when=observed("mem-inplace-activation") >= 16 << 20,
        value=Quantity("extra", observed("mem-inplace-activation"), "bytes"),
        because=(
            "Their backward works from the output as well, which a later module keeps anyway; in place they need no "
            "copy of the input. Counted where nobody else kept that input for backward, at a tenth of all that is "
            "saved. A ReLU keeps its output alone and is not counted."
        ),
        evidence="working in place would spare {extra}",
        fix="`inplace=True` on these modules, where the program does not use their input again.",
        gain=Gain("that much memory at the peak"),
        check="The table of modules shows less saved for backward.",
        techniques=("T33",),
        observed=True,
        examples=(
            Example("leaky ReLUs", {observation("mem-inplace-activation", "blocks.*.act"): flat(200 << 20)}, True),
            Example("a small head", {observation("mem-inplace-activation", "head.act"): flat(1 << 20)}, False),
        ),
    ),
)
