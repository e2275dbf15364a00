"""Several ranks of one run, compared with each other."""

from __future__ import annotations

from gpuwatch.catalog import (
    CPU_WAIT_SECONDS,
    DDP_FIND_UNUSED,
    DDP_SECONDS,
    DDP_UNUSED_BYTES,
    DEVICE_ACTIVE_PEAK,
    DEVICE_CAPACITY,
    GRADIENT_SYNCS,
    OWN_SECONDS,
    OWN_STEP_SECONDS,
    PHASE_SECONDS,
    STEPS,
    WINDOW_STEP_SECONDS,
)
from gpuwatch.expr import Across, Expr, Placed, Quantity, Recorded, series_key
from gpuwatch.rulebook.rule import Example, Gain, Rule, flat, of_ranks, ramp

_MEDIAN_STEP = WINDOW_STEP_SECONDS.where(quantile="0.5")


def _excess(expr: Expr) -> Expr:
    """How much more a rank has than its peers have on average: n / (n - 1) times what it has beyond all n of them."""
    ranks = Across("count", expr)
    return (expr - Across("avg", expr)) * (ranks / (ranks - 1))


_SLOWER = Recorded("rank:gpuwatch_own_seconds:excess", _excess(Placed(OWN_SECONDS)))
_SLOWER_SHARE = _SLOWER / _MEDIAN_STEP
_SLOWER_IN_ALL = Recorded("rank:gpuwatch_own_step_seconds:excess", _excess(OWN_STEP_SECONDS))

_SLOWER_IN_ALL_SHARE = _SLOWER_IN_ALL / _MEDIAN_STEP
# Who waits for a rank takes as long for a step as it does; what trains apart in one launch does not.
_FELT = (_SLOWER_IN_ALL >= 0.005) & (Across("min", _MEDIAN_STEP) >= _MEDIAN_STEP * 0.8)

# A backward waits for slower ranks in its communication: the rank that waits least shows what the network costs.
_EXPOSED = (DDP_SECONDS.where(part="communication") - DDP_SECONDS.where(part="overlap")) * GRADIENT_SYNCS
_NETWORK = Across("min", _EXPOSED)
_NETWORK_SHARE = Across("min", _EXPOSED / _MEDIAN_STEP)

# Where every rank waits for a core, collectives on the CPU do too: it is the machine that is crowded, not the network.
_CROWDED = Across("min", CPU_WAIT_SECONDS / PHASE_SECONDS) >= 0.05
_WORTH_A_CHANGE = (_NETWORK >= 0.005) & (Across("count", _EXPOSED) >= 2)

_FILL = DEVICE_ACTIVE_PEAK / DEVICE_CAPACITY
_FULLEST = Across("max", _FILL)
_UNEVEN = (_FULLEST - Across("min", _FILL)) / _FULLEST


def _steps(seconds: float) -> dict[str, tuple[float, ...]]:
    """Steps that take so long, and now and then twice as long."""
    quantiles = {"0.5": seconds, "0.99": 2 * seconds}
    return {series_key(WINDOW_STEP_SECONDS.name, {"quantile": name}): flat(time, 6) for name, time in quantiles.items()}


def _rank(step: float = 0.2, **own: float) -> dict[str, tuple[float, ...]]:
    """A rank with these seconds of its own by phase."""
    phases = {series_key(OWN_SECONDS.name, {"phase": phase}): flat(seconds, 6) for phase, seconds in own.items()}
    return {**_steps(step), OWN_STEP_SECONDS.name: flat(sum(own.values()), 6), **phases}


def _reducing(
    communication: float, overlap: float = 0.01, step: float = 0.2, syncs: float = 1
) -> dict[str, tuple[float, ...]]:
    """A rank whose backward communicates for so many seconds."""
    parts = {"communication": communication, "overlap": overlap, "backward": 0.5 * step}
    return {
        **{series_key(DDP_SECONDS.name, {"part": part}): flat(seconds, 6) for part, seconds in parts.items()},
        GRADIENT_SYNCS.name: flat(syncs, 6),
        **_steps(step),
    }


def _wanting_a_core(share: float) -> dict[str, tuple[float, ...]]:
    """A rank whose training thread waits for a core for this share of its time."""
    forward = series_key(PHASE_SECONDS.name, {"phase": "forward"})
    return {CPU_WAIT_SECONDS.name: ramp(60 * share, 6), forward: ramp(60, 6)}


def _looking(steps: float, unused: float = 0, flag: float = 1) -> dict[str, tuple[float, ...]]:
    """A rank that makes so many steps a minute and looks for unused parameters."""
    return {DDP_FIND_UNUSED.name: flat(flag), DDP_UNUSED_BYTES.name: flat(unused), STEPS.name: ramp(steps)}


def _filled(peak: float) -> dict[str, tuple[float, ...]]:
    """A rank whose memory was filled to this share."""
    return {DEVICE_ACTIVE_PEAK.name: flat(peak * 80e9, 6), DEVICE_CAPACITY.name: flat(80e9, 6)}


RULES = (
    Rule(
        id="dist-straggler",
        title="One rank holds up the others",
        severity="warn",
        scope="peer",
        when=(_SLOWER_SHARE >= 0.10) & (_SLOWER_IN_ALL_SHARE >= 0.10) & _FELT,
        critical_when=(_SLOWER_SHARE >= 0.20) & (_SLOWER_IN_ALL_SHARE >= 0.20) & _FELT,
        hold_minutes=5,
        value=Quantity("share", _SLOWER_SHARE, "ratio"),
        quantities=(
            Quantity("excess", _SLOWER, "seconds"),
            Quantity("own", Placed(OWN_SECONDS), "seconds"),
            Quantity("step", _MEDIAN_STEP, "seconds"),
        ),
        because=(
            "Ranks that reduce gradients in step take equally long for a step: the fast ones wait for the slow one, in "
            "their backward. So this compares what each rank spends on work of its own, the wait for others left out. "
            "This rank needs longer in one phase than its peers do on average, and in all phases together too. Where "
            "a rank of the run makes its steps in less than four fifths of this one's time, it waits for nobody, and "
            "nothing is said."
        ),
        evidence="its own work in this phase takes {own}, {excess} longer than its peers' on average: {share} of a "
        "step of {step}",
        fix="Look at this rank's node and at what only this rank does. Longer in `data`: its storage, its loader's "
        "workers, a shard with longer samples. In `forward` or `backward`: a longer batch (bucket by length), a clock "
        "held down by heat, a busy neighbour. In `optimizer` or `other`: logging, metrics or a checkpoint on rank 0; "
        "move them off the training thread or make them rarer.",
        gain=Gain("the wait of all other ranks", removable=_SLOWER_SHARE),
        check="The rank's own time comes down to its peers', and every rank makes more steps a second.",
        suppresses=("dist-comm-exposed",),
        techniques=("T26",),
        notes="A slow backward can be told from a wait only where DistributedDataParallel measures it. Under "
        "`fully_shard` forward and backward contain waits, and only the other phases are compared.",
        examples=(
            Example(
                "slow input on one of two ranks",
                of_ranks(_rank(data=0.002, forward=0.05), _rank(data=0.092, forward=0.05)),
                True,
                severity="critical",
            ),
            Example(
                "slow forward on one of four ranks",
                of_ranks(*[_rank(forward=0.05, backward=0.07)] * 3, _rank(forward=0.076, backward=0.07)),
                True,
            ),
            Example(
                "longer in one phase, shorter in another",
                of_ranks(_rank(forward=0.05, other=0.09), _rank(forward=0.09, other=0.05)),
                False,
            ),
            Example(
                "milliseconds",
                of_ranks(_rank(0.01, data=0.001, forward=0.004), _rank(0.01, data=0.0045, forward=0.004)),
                False,
            ),
            Example(
                "short steps",
                of_ranks(_rank(0.04, forward=0.02), _rank(0.04, forward=0.0275)),
                True,
            ),
            Example(
                "a quarter of very short steps",
                of_ranks(_rank(0.02, forward=0.01), _rank(0.02, forward=0.0155)),
                True,
                severity="critical",
            ),
            Example(
                "a peer whose steps are a little shorter",
                of_ranks(_rank(0.17, forward=0.05), _rank(forward=0.15)),
                True,
                severity="critical",
            ),
            Example(
                "one rank far behind, and another behind the rest",
                of_ranks(_rank(forward=0.1), _rank(forward=0.075), _rank(forward=0.03), _rank(forward=0.03)),
                True,
                severity="critical",
            ),
            Example(
                "a little longer in many phases, beside a rank that is longer in one and shorter in the others",
                of_ranks(
                    _rank(1, data=0.18, forward=0.18, backward=0.18, optimizer=0.18),
                    _rank(1, data=0.1, forward=0.3, backward=0.1, optimizer=0.1),
                ),
                False,
            ),
            Example("a rank alone", of_ranks(_rank(data=0.12, forward=0.05)), False),
            Example(
                "two that do not wait for each other", of_ranks(_rank(0.1, forward=0.05), _rank(forward=0.15)), False
            ),
            Example(
                "all equally slow", of_ranks(_rank(data=0.12, forward=0.05), _rank(data=0.12, forward=0.05)), False
            ),
        ),
    ),
    Rule(
        id="dist-comm-exposed",
        title="Steps wait for the network",
        severity="warn",
        scope="run",
        when=((_NETWORK_SHARE >= 0.10) & _WORTH_A_CHANGE).unless(_CROWDED),
        critical_when=((_NETWORK_SHARE >= 0.25) & _WORTH_A_CHANGE).unless(_CROWDED),
        hold_minutes=5,
        value=Quantity("share", _NETWORK_SHARE, "ratio"),
        quantities=(Quantity("exposed", _NETWORK, "seconds"), Quantity("ranks", Across("count", _EXPOSED), "count")),
        because=(
            "Gradients are reduced while backward runs; what is left when it is done is waited for. Waiting for slower "
            "ranks is part of that, so it is the rank that waits least that counts: its wait is the network's. "
            "Where every rank waits for a core a twentieth of the time, nothing is said: on the CPU collectives do too."
        ),
        evidence="on each of {ranks} ranks at least {exposed} of a step is communication that nothing hides: {share}",
        fix="Reduce less often: accumulate gradients, with `no_sync()` on all but the last micro-batch. Send less: "
        "`ddp.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)`. "
        "Or give backward more to hide it behind: a larger batch, `gradient_as_bucket_view=True`.",
        gain=Gain("the communication that nothing hides", removable=_NETWORK_SHARE),
        check="The exposed communication falls below 10 % of a step.",
        techniques=("T25",),
        examples=(
            Example("a slow network", of_ranks(_reducing(0.04), _reducing(0.05)), True),
            Example(
                "a quarter of very short steps",
                of_ranks(_reducing(0.0155, 0.01, 0.02), _reducing(0.0155, 0.01, 0.02)),
                True,
                severity="critical",
            ),
            Example("a very slow network", of_ranks(_reducing(0.07), _reducing(0.07)), True, severity="critical"),
            Example(
                "both micro-batches are reduced", of_ranks(_reducing(0.03, syncs=2), _reducing(0.03, syncs=2)), True
            ),
            Example("on a crowded machine", of_ranks(*[{**_reducing(0.07), **_wanting_a_core(0.08)}] * 2), False),
            Example(
                "one rank on a crowded machine",
                of_ranks({**_reducing(0.07), **_wanting_a_core(0.08)}, {**_reducing(0.07), **_wanting_a_core(0.01)}),
                True,
                severity="critical",
            ),
            Example(
                "a slow network, one rank on a crowded machine",
                of_ranks({**_reducing(0.04), **_wanting_a_core(0.08)}, {**_reducing(0.04), **_wanting_a_core(0.01)}),
                True,
            ),
            Example("one rank waits for the other", of_ranks(_reducing(0.012), _reducing(0.09)), False),
            Example("hidden behind backward", of_ranks(_reducing(0.07, 0.065), _reducing(0.07, 0.065)), False),
            Example("milliseconds", of_ranks(_reducing(0.005, 0.001, 0.012), _reducing(0.005, 0.001, 0.012)), False),
            Example("short steps", of_ranks(_reducing(0.017, 0.01, 0.03), _reducing(0.018, 0.01, 0.03)), True),
            Example(
                "milliseconds on the rank that waits least",
                of_ranks(_reducing(0.014, 0.01, 0.015), _reducing(0.024, 0.01, 0.015)),
                False,
            ),
            Example("a rank alone", of_ranks(_reducing(0.07)), False),
        ),
    ),
    Rule(
        id="dist-no-sync-missing",
        title="Gradients are reduced on every micro-batch",
        severity="warn",
        scope="rank",
        when=GRADIENT_SYNCS >= 1.5,
        value=Quantity("syncs", GRADIENT_SYNCS, "count"),
        because=(
            "Gradients are accumulated over several backward passes, and each of them reduces gradients across all "
            "ranks. Only the sum is needed, once before the optimizer's step."
        ),
        evidence="{syncs} backward passes for an optimizer step reduce gradients",
        fix="Wrap forward and backward of all micro-batches but the last in `with ddp.no_sync():`; under `fully_shard` "
        "call `model.set_requires_gradient_sync(last)` before each forward.",
        gain=Gain(
            "the communication of all micro-batches but the last",
            removable=_EXPOSED * ((GRADIENT_SYNCS - 1) / GRADIENT_SYNCS) / _MEDIAN_STEP,
        ),
        check="One backward pass for an optimizer step reduces gradients.",
        techniques=("T15",),
        examples=(
            Example("four micro-batches", {GRADIENT_SYNCS.name: flat(4)}, True),
            Example("one backward a step", {GRADIENT_SYNCS.name: flat(1)}, False),
            Example("a backward too many now and then", {GRADIENT_SYNCS.name: flat(1.1)}, False),
        ),
    ),
    Rule(
        id="dist-unused-params-flag",
        title="A search for unused parameters finds none",
        severity="warn",
        scope="run",
        when=Across("min", DDP_FIND_UNUSED).equals(1)
        & Across("max", DDP_UNUSED_BYTES).equals(0)
        & (Across("min", STEPS) >= 50),
        value=Quantity("flag", Across("min", DDP_FIND_UNUSED), "count"),
        quantities=(Quantity("steps", Across("min", STEPS), "count"),),
        because=(
            "With `find_unused_parameters=True` every forward walks the whole autograd graph for parameters that take "
            "no part in it, and gradients cannot be reduced before that. No rank has found one in the steps that "
            "DistributedDataParallel looked at (the first ten, then one in a hundred)."
        ),
        evidence="no unused parameter was found in {steps} steps, on any rank",
        fix="Drop `find_unused_parameters=True`. Where branches of the model depend on the input, keep it; where the "
        "same parameters are unused in every step, `static_graph=True` serves.",
        gain=Gain("a walk over the graph in every step"),
        check="The flag is 0 and steps per second rise.",
        techniques=("T25",),
        examples=(
            Example("never one on two ranks", of_ranks(_looking(20), _looking(20)), True),
            Example("one rank found one", of_ranks(_looking(20), _looking(20, unused=4096)), False),
            Example("looked for on one rank", of_ranks(_looking(20), _looking(20, flag=0)), False),
            Example("not looked for", of_ranks(_looking(20, flag=0), _looking(20, flag=0)), False),
            Example("a run that has just begun", of_ranks(_looking(3), _looking(3)), False),
        ),
    ),
    Rule(
        id="dist-memory-imbalance",
        title="One rank needs far more device memory than another",
        severity="warn",
        scope="peer",
        when=(_FILL >= 0.50) & (_UNEVEN >= 0.20) & (_FILL >= _FULLEST),
        hold_minutes=5,
        value=Quantity("fill", _FILL, "ratio"),
        quantities=(
            Quantity("uneven", _UNEVEN, "ratio"),
            Quantity("peak", DEVICE_ACTIVE_PEAK, "bytes"),
            Quantity("least", Across("min", DEVICE_ACTIVE_PEAK), "bytes"),
        ),
        because=(
            "The batch size of all ranks is limited by the fullest one. This rank's peak is at least a fifth above the "
            "least filled rank's, and more than half of its device."
        ),
        evidence="its peak is {peak}, {fill} of its device; the least of a rank is {least}, {uneven} below",
        fix="Look for what only this rank holds: outputs gathered for metrics or logging, a copy of the model or of a "
        "checkpoint that `torch.load` put on `cuda:0` (pass `map_location`), another process's context on its device. "
        "Stages of a pipeline can be cut elsewhere; samples can be spread by length.",
        gain=Gain("a larger batch on every rank"),
        check="The peaks of the ranks come within a fifth of each other.",
        techniques=("T26",),
        examples=(
            Example("rank 0 gathers", of_ranks(_filled(0.9), _filled(0.6), _filled(0.61)), True),
            Example("all alike", of_ranks(_filled(0.85), _filled(0.9), _filled(0.88)), False),
            Example("within a fifth", of_ranks(_filled(0.9), _filled(0.74)), False),
            Example("all far from full", of_ranks(_filled(0.3), _filled(0.1), _filled(0.1)), False),
        ),
    ),
)
