"""Training in several processes: what DistributedDataParallel measures of itself, how often gradients are reduced.

Read from torch's own counters, on the training thread, at looks and ticks: no collective, no synchronisation, no
setting changed.
"""

from __future__ import annotations

import json
import statistics
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic_ns

import torch
import torch.distributed

from gpuwatch.catalog import (
    COLLECTIVES,
    DDP_FIND_UNUSED,
    DDP_SECONDS,
    DDP_UNUSED_BYTES,
    GRADIENT_SYNCS,
    USED_GPUS,
    VISIBLE_GPUS,
)
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.ownwork import OwnWork, usual
from gpuwatch_hooks.wrappers import Wrappers

SAMPLED_AT_FIRST = 12
"""DistributedDataParallel times its first ten iterations, then one in a hundred: these steps are all read."""

WARM_UP_ITERATIONS = 2
FEWEST_SAMPLES = 3
FEWEST_STEPS = 20
RECENT = 64
FINDS = 4
"""Looks and ticks at which the models are looked through; later, when their number changes."""

DEVICE_TICKS = 30

MOST_GROUPS = 4
"""Process groups whose collectives are counted."""

_PARTS = {"forward": "forward_compute_time", "backward": "backward_compute_time"}
_COMMUNICATION, _OVERLAP = "backward_comm_time", "backward_compute_comm_overlap_time"
_STATES = {"enqueued": "last_enqueued_collective", "completed": "last_completed_collective"}


class DistributedProbe:
    """One process among several, or one that leaves devices idle."""

    def __init__(
        self,
        record: RecordWriter,
        models: list[weakref.ref[torch.nn.Module]],
        looked: Sequence[Mapping[str, float]],
    ) -> None:
        self.record = record
        self.models = models
        self.wrappers = Wrappers()
        self.own = OwnWork(record, looked)
        self.alone = record.identity.get("world_size", 1) == 1
        self._ticks = 0
        self._finds = 0
        self._found_in = 0
        self._steps = 0
        self._reduces: bool | None = None  # what the backward of the last forward does
        self._reduced = 0  # backwards of the open step that did
        self._syncs: deque[int] = deque(maxlen=RECENT)
        self._iteration = 0
        self._samples: dict[str, deque[float]] = {part: deque(maxlen=16) for part in _PARTS}
        self._exchanges: deque[tuple[float, float]] = deque(maxlen=16)
        self._buffers: deque[float] = deque(maxlen=RECENT)
        self._entered = 0
        self._unused = 0

    # -- looks -------------------------------------------------------------------------------------------------------

    @guarded("distributed")
    def forward_begin(self, module: torch.nn.Module) -> None:
        """A watched model is called to train: now is decided whether its backward reduces gradients."""
        self.wrappers.entered(module)
        self._reduces = self.wrappers.reduces()
        self._entered = monotonic_ns()

    @guarded("distributed")
    def inner_begin(self) -> None:
        """The module within DistributedDataParallel is called: buffers are in step."""
        if self._entered:
            self._buffers.append((monotonic_ns() - self._entered) / 1e9)
            self._entered = 0

    @guarded("distributed")
    def backward_begin(self) -> None:
        """Autograd starts; without a forward before it, it is no training backward."""
        if self._reduces:
            self._reduced += 1
        self._entered = 0
        self._reduces = False if self._reduces is not None else None

    @guarded("distributed")
    def step_end(self) -> None:
        """An optimizer has stepped during a look."""
        self._steps += 1
        if self._reduces is not None:
            self._syncs.append(self._reduced)
        self._reduced = 0
        if not self.alone and self._steps <= SAMPLED_AT_FIRST:
            self._sample()

    def inner(self) -> torch.nn.Module | None:
        """The module whose call tells when buffers are in step; None where no time passes before it."""
        self._find()
        wrapper = None if self.alone else self.wrappers.distributed()
        if wrapper is None or not wrapper.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            return None
        module = wrapper.module
        return None if isinstance(module, torch.jit.ScriptModule) else module

    # -- ticks -------------------------------------------------------------------------------------------------------

    @guarded("distributed")
    def publish(self) -> None:
        """Write what is known."""
        self._find()
        if len(self._syncs) >= FEWEST_STEPS:
            self._write(GRADIENT_SYNCS.name, statistics.fmean(self._syncs))
        self._count_devices()
        self._sample()
        self._write_samples()
        if not self.alone:
            self._publish_own()
            self._count_collectives()

    def _find(self) -> None:
        """Look for wrappers where that is due; those of models that are gone stay known for what was measured."""
        living = [model for known in self.models if (model := known()) is not None]
        if living and (self._finds < FINDS or len(living) != self._found_in):
            self._finds += 1
            self._found_in = len(living)
            self.wrappers.find(living)
            for place, devices in self.wrappers.replicated.items():
                seen = f"on devices {', '.join(map(str, devices))}" if devices else "on the CPU"
                self.record.observe("dist-dataparallel", place, seen, max(1, len(devices)))

    def _sample(self) -> None:
        """Take in what DistributedDataParallel timed last, if that is new."""
        wrapper = self.wrappers.distributed()
        if wrapper is None:
            return
        data = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        self._write(DDP_FIND_UNUSED.name, float(data.get("find_unused_parameters", 0)))
        self._unused = max(self._unused, int(data.get("unused_parameter_size") or 0))
        self._write(DDP_UNUSED_BYTES.name, self._unused)
        iteration = int(data.get("iteration") or 0)
        if iteration == self._iteration or iteration <= WARM_UP_ITERATIONS:
            return
        self._iteration = iteration
        for part, key in _PARTS.items():
            nanoseconds = int(data.get(key) or 0)
            if nanoseconds > 0:
                self._samples[part].append(nanoseconds / 1e9)
        communication = int(data.get(_COMMUNICATION) or 0)
        if communication > 0:
            self._exchanges.append((communication / 1e9, int(data.get(_OVERLAP) or 0) / 1e9))

    def _write_samples(self) -> None:
        for part in _PARTS:
            seconds = self._usual(part)
            if seconds is not None and not self.alone:
                self._write(DDP_SECONDS.name, seconds, part=part)
        if len(self._exchanges) >= FEWEST_SAMPLES and not self.alone:
            for part, seconds in zip(("communication", "overlap"), unhindered(self._exchanges), strict=True):
                self._write(DDP_SECONDS.name, seconds, part=part)
        if len(self._buffers) >= FEWEST_SAMPLES:
            self._write(DDP_SECONDS.name, usual(self._buffers), part="buffers")

    def _usual(self, part: str) -> float | None:
        samples = self._samples[part]
        return usual(samples) if len(samples) >= FEWEST_SAMPLES else None

    def _publish_own(self) -> None:
        known: dict[str, float | None] = {}
        if self.wrappers.wrapped():
            known["backward"] = self._usual("backward")
            forward = self.own.usual("forward")
            if self.record.identity.get("device") != "cpu":
                forward = self._usual("forward")  # by the device's clock; the host only issues the work
            buffers = usual(self._buffers) if self._buffers else 0.0
            known["forward"] = None if forward is None else forward - buffers
        if self.wrappers.waits_within:
            known["forward"] = known["backward"] = None
        self.own.publish(known)

    def _count_collectives(self) -> None:
        """Of each process group, the last collective that was enqueued, and the last that is done."""
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
        if dump is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        status = json.loads(dump(includeCollectives=False)).get("pg_status", {})
        for group in sorted(status)[:MOST_GROUPS]:
            for state, key in _STATES.items():
                self._write(COLLECTIVES.name, max(0, int(status[group].get(key, 0))), group=group, state=state)

    def _count_devices(self) -> None:
        """Accelerators that this process may use, and those it holds memory on; rarely, since it costs a little."""
        self._ticks += 1
        rare = self._ticks > FINDS and self._ticks % DEVICE_TICKS
        if rare or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        count = torch.cuda.device_count()
        self._write(VISIBLE_GPUS.name, count)
        self._write(USED_GPUS.name, sum(torch.cuda.memory_reserved(index) > 0 for index in range(count)))

    def _write(self, name: str, number: float, **labels: str) -> None:
        self.record.values[self.record.series(name, **labels)] = number


def unhindered(exchanges: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The communication of an iteration, and its overlap with backward, where little of it was a wait for other ranks.

    Ranks that are slow by turns, as longer batches make them, wait for each other in most iterations: what the network
    costs is seen in those in which the rank itself came last.
    """
    ordered = sorted(exchanges, key=lambda pair: pair[0] - pair[1])
    return ordered[len(ordered) // 8]
