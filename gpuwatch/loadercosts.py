"""What a batch costs this run, read from its gauges; and from that the loader setting to recommend.

What is measured on a crowded machine includes waiting for a core. It is taken out, as far as the kernel tells it: the
cores are reckoned with once, in the model. Where an input is missing there is no advice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuwatch import means
from gpuwatch.catalog import (
    BATCHES,
    CPU_WAIT_SECONDS,
    DEVICE_PHASE_SECONDS,
    LOADER_AFFORDABLE,
    LOADER_ALONE,
    LOADER_BATCH_BYTES,
    LOADER_BATCH_CPU_SECONDS,
    LOADER_BATCH_SECONDS,
    LOADER_BEST_PREFETCH,
    LOADER_BEST_WAIT,
    LOADER_BEST_WORKERS,
    LOADER_CROWDED,
    LOADER_EXPECTED_WAIT,
    LOADER_NEEDED_CORES,
    LOADER_OWN_RATIO,
    LOADER_PART_SECONDS,
    LOADER_PREFETCH,
    LOADER_READY,
    LOADER_RECEIVE_CPU_SECONDS,
    LOADER_SHARE,
    LOADER_WORKERS,
    PHASE_SECONDS,
    PHASES,
    TRAINING_CORES,
    WORKER_BLOCKED,
    WORKER_CPU,
    WORKER_CPU_WAIT,
)
from gpuwatch.delivery import Costs, Setting
from gpuwatch.expr import series_key
from gpuwatch.limits import SHORT_WAIT_SECONDS, STARVED_WORKERS
from gpuwatch.loaderroom import room_left, sane
from gpuwatch.sizing import Advice, advice_for, recommend
from gpuwatch.spread import cut, spread
from gpuwatch.window import ABSURD, FEWEST_STEPS, Gauge, Steps, middle

SENDING_SECONDS = 0.5e-3
"""What a worker spends on a batch beside making it: to pickle it and to hand over its memory. Measured: 0.5 to 0.8 ms
of CPU time for batches of one to four tensors, on a machine of 2 virtual cores."""

RECEIVING_SECONDS = 1e-3
"""What the training thread spends to take a batch that is ready. Measured there: 0.8 to 1.3 ms for one tensor."""

SHARING_SECONDS_PER_BYTE = 0.65e-9
"""What collating costs more where the batch has to lie in shared memory: fresh pages. Measured on 1 to 33 MB."""

CROWDED = 0.2
"""Share of their time that workers wait for a core, from which they are too many for the cores."""

HARDLY_ANY = 0.02
"""Share of waits below which the setting in use is the right one."""

LEAST_BATCHES = 0.01
"""Batches a step takes at least: one batch may serve several steps, but not any number."""

MOST_SANE = 512
"""Workers, and batches that each loads ahead, beyond which a record is not believed."""

MOSTLY_READY = 0.5
"""Share of fetches that find a batch ready, from which what they cost is believed."""

TOLD_APART = 0.01
"""Share of CPU time from which the whole can be told by its CPU time."""

ALL_READY = 0.9
"""Share of fetches that find a batch ready, from which none is waited for."""

MOSTLY_OWN = 0.5
"""Share of the wait that is the training thread's own work, from which that is what it waits for."""

MOSTLY_CROWD = 0.5
"""The training thread's wait for a core, beside its wait for data, from which one may be the other."""

_QUANTILES = ("0.1", "0.25", "0.5", "0.75", "0.9", "0.99")


@dataclass(frozen=True)
class MeanStep:
    """A usual step of the recent window, in seconds, and the batches it takes."""

    total: float
    waiting: float
    training: float
    batches: float


def gauges(values: Mapping[str, float], steps: Steps, count: int, run_seconds: float) -> Iterator[Gauge]:
    """The gauges of the recommended setting; none where an input is missing or makes no sense.

    ``values`` are a rank's gauges by series key, ``steps`` its recent steps, ``count`` all its steps so far.
    """
    own = own_ratio(values, steps)
    if own is not None:
        yield LOADER_OWN_RATIO, (), own
    # A step may take a batch of each of several loaders; the advice is for one of them.
    batches = values.get(BATCHES.name, 0.0) * values.get(LOADER_SHARE.name, 1.0)
    step = mean_step(steps, batches / count if count > 0 else 0.0)
    advice = None if step is None else advice_of(values, step, run_seconds)
    if step is not None and advice is not None:
        yield LOADER_ALONE, (), advice.making
        yield LOADER_BEST_WORKERS, (), float(advice.setting.workers)
        yield LOADER_BEST_PREFETCH, (), float(advice.setting.prefetch)
        yield LOADER_BEST_WAIT, (), advice.wait_ratio
        yield LOADER_NEEDED_CORES, (), advice.needed_cores
        if advice.affordable is not None:
            yield LOADER_AFFORDABLE, (), advice.affordable
        expected = None
        if advice.expected_wait is not None:
            expected = advice.expected_wait * step.batches
            yield LOADER_EXPECTED_WAIT, (), expected
        yield LOADER_CROWDED, (), float(crowded_out(values, usual_wait(steps) or 0.0, own or 0.0, expected))


def crowded_out(values: Mapping[str, float], wait: float, own: float, expected: float | None) -> bool:
    """Whether batches are late for want of cores alone.

    They are ready, and long in coming, though it is little work to take one: the training thread has no core for it. Or
    by what they cost nothing would be late, and they are made without a core.
    """
    if own >= MOSTLY_OWN:
        return False
    waiting = values.get(series_key(PHASE_SECONDS.name, {"phase": "data"}), 0.0)
    late = wait >= SHORT_WAIT_SECONDS and values.get(CPU_WAIT_SECONDS.name, 0.0) >= MOSTLY_CROWD * waiting > 0
    if late and values.get(LOADER_READY.name, 0.0) >= ALL_READY:
        return True
    starved = values.get(WORKER_CPU_WAIT.name, 0.0) >= STARVED_WORKERS or (late and not values.get(LOADER_WORKERS.name))
    return starved and expected is not None and expected + sampler_seconds(values) < SHORT_WAIT_SECONDS


def usual_wait(steps: Steps) -> float | None:
    """The median wait of these steps; None of too few."""
    waits = [wait for wait in steps.waits if 0 <= wait < ABSURD]
    return middle(sorted(waits)) if len(waits) >= FEWEST_STEPS else None


def own_ratio(values: Mapping[str, float], steps: Steps) -> float | None:
    """Share of the usual wait that is the training thread's own work; None where neither or no wait is known."""
    parts = (series_key(LOADER_PART_SECONDS.name, {"part": "sampler"}), LOADER_RECEIVE_CPU_SECONDS.name)
    known = [seconds for name in parts if (seconds := values.get(name)) is not None and sane(seconds)]
    wait = usual_wait(steps)
    if not known or wait is None:
        return None
    return min(1.0, sum(known) / max(wait, SHORT_WAIT_SECONDS))


def mean_step(steps: Steps, batches: float) -> MeanStep | None:
    """The mean of these steps; of their training the slowest are left out: a checkpoint's second is not training."""
    known = [(total, wait) for total, wait in zip(steps.totals, steps.waits, strict=True) if 0 <= wait <= total]
    if len(known) < FEWEST_STEPS or not LEAST_BATCHES <= batches < ABSURD:
        return None
    training = sorted(total - wait for total, wait in known)[: -max(1, len(known) // 50)]
    return MeanStep(
        total=means.mean(total for total, _ in known),
        waiting=means.mean(wait for _, wait in known),
        training=means.mean(training),
        batches=batches,
    )


def advice_of(values: Mapping[str, float], step: MeanStep, run_seconds: float) -> Advice | None:
    """What to set for this run, from its own costs."""
    present = present_setting(values)
    if present is None:
        return None
    costs = batch_costs(values, step, run_seconds, present)
    room = room_left(values, present)
    if costs is None or room is None:
        return None
    crowded = values.get(WORKER_CPU_WAIT.name, 0.0) >= CROWDED
    if step.waiting <= HARDLY_ANY * step.total and not crowded:
        # Nothing to gain, and nothing to work out: the usual case, and this is asked at every scrape.
        return advice_for(costs, room, present, step.waiting / step.total if step.total else 0.0)
    return recommend(costs, room, present, crowded)


def present_setting(values: Mapping[str, float]) -> Setting | None:
    """What the loader is set to."""
    workers, prefetch = values.get(LOADER_WORKERS.name), values.get(LOADER_PREFETCH.name)
    if workers is None or not 0 <= workers <= MOST_SANE:
        return None
    return Setting(int(workers), int(prefetch) if prefetch and 1 <= prefetch <= MOST_SANE / 8 else 2)


def batch_costs(values: Mapping[str, float], step: MeanStep, run_seconds: float, present: Setting) -> Costs | None:
    """The costs of a batch, without waits for a core."""
    measured = making_seconds(values, step, present)
    making_cpu, cores = values.get(LOADER_BATCH_CPU_SECONDS.name), values.get(TRAINING_CORES.name)
    if not measured or making_cpu is None or cores is None or not sane(making_cpu, cores, run_seconds):
        return None
    mean = means.mean(measured)
    # For each second of CPU time the training thread waited this long for a core.
    delay = max(0.0, values.get(CPU_WAIT_SECONDS.name, 0.0)) / (cores * run_seconds) if cores * run_seconds else 0.0
    cpu = cores * step.total / step.batches
    receiving = receiving_seconds(values, cpu) + sampler_seconds(values)
    if present.workers:
        ran, blocked = values.get(WORKER_CPU.name), values.get(WORKER_BLOCKED.name)
        alone = mean if ran is None or blocked is None else mean * (ran + blocked)
        own_cpu, sharing = receiving, 0.0
    else:
        alone = mean - delay * making_cpu
        own_cpu, sharing = making_cpu, SHARING_SECONDS_PER_BYTE * max(0.0, values.get(LOADER_BATCH_BYTES.name, 0.0))
    alone = min(mean, max(alone, making_cpu))  # that long it ran, at least
    training_cpu = max(0.0, cpu - own_cpu)
    training = max(step.training, _device_seconds(values, step.total)) / step.batches
    # It waits where it runs, and a little at each awakening.
    waited = delay * max(training_cpu, cpu * step.training / step.total if step.total else 0.0)
    return Costs(
        training=max(training / 2, training - waited),
        training_cpu=training_cpu,
        making=cut(measured, alone),
        making_cpu=min(making_cpu, alone),
        sending=SENDING_SECONDS + sharing,
        receiving=receiving,
    )


def making_seconds(values: Mapping[str, float], step: MeanStep, present: Setting) -> tuple[float, ...]:
    """Equally likely times to make a batch, sorted; empty where they are not known."""
    known = {}
    for name in _QUANTILES:
        seconds = values.get(series_key(LOADER_BATCH_SECONDS.name, {"quantile": name}))
        if seconds is not None:
            known[float(name)] = seconds
    if 0.5 not in known or not sane(*known.values()):
        return ()
    return spread(known, mean_seconds(values, step, present))


def mean_seconds(values: Mapping[str, float], step: MeanStep, present: Setting) -> float | None:
    """Mean time to make a batch: the training thread waits for it, or it is CPU time by the share of CPU time."""
    if not present.workers:
        return max(0.0, step.waiting / step.batches - sampler_seconds(values))
    share = values.get(WORKER_CPU.name, 0.0)
    cpu = values.get(LOADER_BATCH_CPU_SECONDS.name)
    return cpu / share if cpu is not None and TOLD_APART < share < 1 else None


def receiving_seconds(values: Mapping[str, float], cpu: float) -> float:
    """What it costs the training thread to take a batch that is ready; of all its process does, ``cpu`` is CPU time."""
    measured = values.get(series_key(LOADER_PART_SECONDS.name, {"part": "transfer"}))
    own = values.get(LOADER_RECEIVE_CPU_SECONDS.name, 0.0)
    least = max(RECEIVING_SECONDS, own if sane(own) else 0.0)  # what it computes for that it spends
    if measured is None or not sane(measured):
        return least
    # In a starved run what is ready is often a batch whose turn is later, and the time is that of the one before it.
    believed = max(least, cpu) if values.get(LOADER_READY.name, 0.0) >= MOSTLY_READY else least
    return min(measured, believed)


def sampler_seconds(values: Mapping[str, float]) -> float:
    """What the sampler takes for a batch: on the training thread, whoever makes the batch; 0 where it is not known."""
    measured = values.get(series_key(LOADER_PART_SECONDS.name, {"part": "sampler"}), 0.0)
    return measured if sane(measured) else 0.0


def _device_seconds(values: Mapping[str, float], total: float) -> float:
    """Seconds of such a step that the device worked, by its own clock; 0 without one.

    Work is queued to it: while it still computes, the training thread may wait for data, and lose nothing by that.
    """
    seconds = {name: values.get(series_key(DEVICE_PHASE_SECONDS.name, {"phase": name}), 0.0) for name in PHASES}
    worked = sum(seconds.values())
    return total * (1 - seconds["data"] / worked) if worked > 0 else 0.0
