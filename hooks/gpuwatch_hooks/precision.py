"""Parameters in float64 that nobody asked for."""

from __future__ import annotations

import weakref

import torch

from gpuwatch.record import RecordWriter
from gpuwatch_hooks.guard import guarded

RULE = "comp-float64"
READINGS = 3
"""Looks at the parameters: at the first three ticks, since a model may be cast after attach."""


class PrecisionProbe:
    """Reads the dtype of every parameter, a few times in a run."""

    def __init__(self, record: RecordWriter, models: list[weakref.ref[torch.nn.Module]]) -> None:
        self.record = record
        self.models = models
        self.readings = 0
        self.place = ""

    @guarded("precision")
    def publish(self) -> None:
        """Say which share of the parameters' elements is float64 while the default dtype is another."""
        if self.readings >= READINGS or torch.get_default_dtype() == torch.float64:
            return
        self.readings += 1
        wide, total, place = 0, 0, ""
        for known in self.models:
            model = known()
            for name, parameter in () if model is None else model.named_parameters():
                if torch.nn.parameter.is_lazy(parameter):
                    continue  # it has no elements yet
                total += parameter.numel()
                if parameter.dtype == torch.float64:
                    wide += parameter.numel()
                    place = place or self.place or f"{type(model).__name__}.{name}"
        self.place = place or self.place  # one place: a model that is cast back is said to be
        if self.place and total:
            self.record.observe(RULE, self.place, f"{wide:,} of {total:,} parameter elements", wide / total)
