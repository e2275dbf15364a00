"""Memory by module, looked at about three times in a run's first thousand steps and rarely later.

A measurement is one forward of each watched model (:mod:`gpuwatch_hooks.saved`); at the end of that step the table is
made. The next one is so far away that all of them together cost less than :data:`SHARE` of the run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from time import monotonic_ns

import torch

from gpuwatch.catalog import MEMORY_PARTS, MODEL_MEMORY, MODULE_MEMORY
from gpuwatch.layout import MODULE_ROW
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.folding import folded
from gpuwatch_hooks.moduletable import Row, repeated, table
from gpuwatch_hooks.saved import SavedTensors, measurable, storage_of

ACTIVATION_RULE = "mem-activation-dominant"
INPLACE_RULE = "mem-inplace-activation"

SCHEDULE = (12, 48)
LATER_STEPS = 600
SHARE = 0.001
HOOK_NANOSECONDS = 4_000
"""What a call of a module costs more while it is measured, about."""

SHOWN = 10
MOST_ROWS = 40
MOST_NAMES = 24
"""Names of modules that ever become labels: a model that changes all the time must not make ever new series."""

CHALLENGE = 1.25
OTHER = "_other"
LEAST_EXTRA_SHARE = 0.1

_INPLACE = (
    torch.nn.ReLU,
    torch.nn.ReLU6,
    torch.nn.LeakyReLU,
    torch.nn.ELU,
    torch.nn.CELU,
    torch.nn.Hardtanh,
    torch.nn.Threshold,
)
"""Modules that can work in place, and whose backward then needs the output alone."""


class ModuleProbe:
    """Decides when to measure, and writes what was found."""

    def __init__(
        self,
        record: RecordWriter,
        clock: StepClock,
        models: list[weakref.ref[torch.nn.Module]],
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
    ) -> None:
        self.record = record
        self.clock = clock
        self.models = models
        self.optimizers = optimizers
        self.next_step = SCHEDULE[0]
        self.current: SavedTensors | None = None
        self.done: list[SavedTensors] = []
        self.began = monotonic_ns()
        self.spent = 0
        self.measured = 0
        self.shown: list[str] = []
        self._named: set[str] = set()
        self._rows: set[str] = set()
        self._extra: set[str] = set()

    # -- events ------------------------------------------------------------------------------------------------------

    def forward_begin(self, module: torch.nn.Module) -> None:
        """A watched model is called to train, in a look, and a measurement is due."""
        if self.current is not None and not self.current.after_forward():
            return  # within another watched model, or the one before raised
        if self.current is not None and not self.finish_one():
            return
        if any(saved.root is module for saved in self.done):
            return  # the next batch of the same step
        began = monotonic_ns()
        if not measurable(module):
            self._put_off()
            return
        device = next((parameter.device.type for parameter in module.parameters()), "cpu")
        excluded = {storage_of(tensor) for model in self._living() for tensor in _lasting(model)}
        self.current = SavedTensors(module, excluded, device)
        self.current.begin(module)
        self.spent += monotonic_ns() - began

    def forward_end(self, module: torch.nn.Module) -> None:
        """It returned."""
        if self.current is not None and self.current.root is module:
            self.current.returned()

    def backward_begin(self) -> None:
        """Autograd starts: what the measured model and its loss saved is all known."""
        if self.current is not None:
            self.current.foreign = self.current.foreign or not self.current.after_forward()  # within the forward
            self.finish_one()

    def finish_one(self) -> bool:
        """End the measurement of a model. False while somebody else's hooks are in the way."""
        saved = self.current
        if saved is None:
            return True
        if not saved.end():
            return False
        self.current = None
        if saved.foreign:
            self._put_off()
        else:
            self.done.append(saved)
        return True

    def step_end(self) -> None:
        """During a look an optimizer has stepped."""
        if self.current is not None and not self.finish_one():
            return
        if not self.done:
            return
        began = monotonic_ns()
        done, self.done = self.done, []
        self._write(done)
        self.measured += 1
        self.spent += monotonic_ns() - began + HOOK_NANOSECONDS * sum(saved.calls for saved in done)
        self._put_off()

    def stop(self) -> None:
        """The run ends."""
        if self.current is not None:
            self.current.end()
            self.current = None

    def _put_off(self) -> None:
        """The next measurement: soon at first, then so late that all of them are within the budget."""
        step = max(self.clock.steps, 1)
        planned = [at for at in SCHEDULE if at > step]
        per_step = (monotonic_ns() - self.began) / step
        affordable = int(self.spent / SHARE / max(per_step, 1.0))
        self.next_step = planned[0] if planned and self.measured <= 1 else max(step + LATER_STEPS, affordable)

    def _living(self) -> list[torch.nn.Module]:
        return [model for known in self.models if (model := known()) is not None]

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, done: list[SavedTensors]) -> None:
        measured: list[tuple[torch.nn.Module, SavedTensors | None]] = []
        measured += [(root, saved) for saved in done if (root := saved.root) is not None]
        roots = [root for root, _ in measured]
        measured += [(model, None) for model in self._living() if all(model is not root for root in roots)]
        states = [optimizer.state for optimizer in self.optimizers()]

        def state_of(parameter: torch.Tensor) -> Iterable[torch.Tensor]:
            for state in states:
                for item in (state.get(parameter) or {}).values():
                    if isinstance(item, torch.Tensor):
                        yield item

        rows = table(measured, state_of)
        for part in MEMORY_PARTS:
            self._put(MODEL_MEMORY.name, sum(getattr(row, part) for row in rows.values()), part=part)
        self._write_rows(rows)
        self._show(rows)
        self._suggest(done)

    def _put(self, name: str, number: float, **labels: str) -> None:
        self.record.values[self.record.series(name, **labels)] = number

    def _write_rows(self, rows: dict[str, Row]) -> None:
        """The whole table, for the report; it is not published."""
        kept = sorted(rows, key=lambda name: -rows[name].total())[:MOST_ROWS]
        for name in self._rows - set(kept):
            for column in vars(Row()):
                self._put(MODULE_ROW, float("nan"), module=name, part=column)
        for name in kept:
            if name in self._rows or len(self._rows) < MOST_ROWS + 10:
                self._rows.add(name)
                for column, number in vars(rows[name]).items():
                    self._put(MODULE_ROW, number, module=name, part=column)

    def _show(self, rows: dict[str, Row]) -> None:
        """The ten largest as series; one that is shown stays until another is clearly larger."""

        def weight(name: str) -> float:
            row = rows.get(name)
            return (row.total() if row else 0) * (CHALLENGE if name in self.shown else 1.0)

        candidates = [name for name in rows if name in self._named or len(self._named) < MOST_NAMES]
        shown = sorted(candidates, key=lambda name: -weight(name))[:SHOWN]
        for name in set(self.shown) - set(shown):
            self._put(MODULE_MEMORY.name, float("nan"), module=name)
        self.shown = shown
        self._named.update(shown)
        for name in shown:
            self._put(MODULE_MEMORY.name, rows[name].total(), module=name)
        self._put(MODULE_MEMORY.name, sum(row.total() for name, row in rows.items() if name not in shown), module=OTHER)

    def _suggest(self, done: list[SavedTensors]) -> None:
        for saved in done:
            group = repeated(saved)
            if group is not None:
                evidence = (
                    f"`{group.name}` ({group.count} of them) saved {group.activations:,} bytes for backward; "
                    f"checkpointing each saves {group.saving():,} bytes at most"
                )
                self.record.observe(ACTIVATION_RULE, group.name, evidence, group.activations)
        names, extra = extra_outputs(done)
        where = ", ".join(names[:3])
        for stale in self._extra - {where}:
            self.record.observe(INPLACE_RULE, stale, "no more", 0.0)
        self._extra = {where} if extra else set()
        total = sum(saved.total for saved in done)
        if extra >= LEAST_EXTRA_SHARE * max(total, 1):
            evidence = f"{extra / total:.0%} of what is saved for backward"
            self.record.observe(INPLACE_RULE, where, evidence, extra)
        else:
            self._extra = set()


def extra_outputs(done: list[SavedTensors]) -> tuple[list[str], int]:
    """Activations that keep their input beside their output, and the bytes that working in place would spare."""
    sizes: dict[str, int] = {}
    for saved in done:
        for path, module in () if saved.root is None else saved.root.named_modules():
            if path not in saved.through or not isinstance(module, _INPLACE) or module.inplace:
                continue
            before, after = saved.through[path]
            # Only where nobody but this module needs its input, and somebody keeps its output too.
            if before != after and saved.savers.get(before) == [path] and set(saved.savers.get(after, ())) - {path}:
                name = folded(path)
                sizes[name] = sizes.get(name, 0) + saved.sizes[before]
    return sorted(sizes, key=lambda name: -sizes[name]), sum(sizes.values())


def _lasting(model: torch.nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
