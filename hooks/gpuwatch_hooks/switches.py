"""Debugging switches that are on while the run trains: read at the start of a backward, inside whatever context."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from gpuwatch.limits import SWITCH_STEPS
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.guard import guarded

_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("TRACE",),
}


class SwitchProbe:
    """Counts for each switch how many training steps in a row it was on."""

    def __init__(self, record: RecordWriter, clock: StepClock) -> None:
        self.record = record
        self.clock = clock
        self.since: dict[tuple[str, str], int] = {}  # the first step of the present stretch
        self._step = 0  # the step that is looked at
        self._on: set[tuple[str, str]] = set()  # on at some backward of it
        self.longest: dict[tuple[str, str], int] = {}
        self.environment = debugging_variables(os.environ)

    def look(self) -> None:
        """Read the switches; four calls of some 50 ns each."""
        if self.clock.steps != self._step:
            self._step = self.clock.steps
            for switch in [switch for switch in self.since if switch not in self._on]:
                del self.since[switch]
            self._on.clear()
        self._state(("debug-anomaly", ""), torch.is_anomaly_enabled())
        self._state(("debug-profiler-on", ""), torch._C._autograd._profiler_enabled())
        fill = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        self._state(("debug-deterministic-fill", ""), fill)
        if self.environment:
            for variable in self.environment:
                self._state(("debug-env-sync", variable), True)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._state(("debug-env-sync", "torch.cuda.set_sync_debug_mode"), torch.cuda.get_sync_debug_mode() != 0)

    def _state(self, switch: tuple[str, str], on: bool) -> None:
        if on:
            self._on.add(switch)
            begun = self.since.setdefault(switch, self._step)
            self.longest[switch] = max(self.longest.get(switch, 0), self._step - begun + 1)

    def suspicious(self) -> bool:
        """Whether one is on that has never been on for long: then each of the next steps counts."""
        return bool(self._on) and any(self.longest[switch] <= SWITCH_STEPS for switch in self._on)

    @guarded("switches")
    def publish(self) -> None:
        """Say the longest stretch of each."""
        for (rule, where), steps in self.longest.items():
            self.record.observe(rule, where, "", steps)


def debugging_variables(environment: Mapping[str, str]) -> list[str]:
    """``NAME=value`` of the variables that are set to a debugging value."""
    return [
        f"{name}={environment[name]}"
        for name, values in _VARIABLES.items()
        if environment.get(name, "").strip().upper() in values
    ]
