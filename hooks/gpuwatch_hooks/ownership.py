"""Which optimizer owns which parameters: one that is built again and again, and gradients that none of them uses."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from gpuwatch.record import RecordWriter
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.folding import folded

RECREATED_RULE = "opt-recreated"
UNUSED_RULE = "opt-unused-grads"

MOST_KEPT = 64
FIRST_STEP = 24
EVERY_STEPS = 16
SELDOM_STEPS = 256
CONFIRMATIONS = 3
LEAST_SHARE = 0.05
"""Share of all gradients' bytes below which nothing is said."""


@dataclass
class _Known:
    """An optimizer that has stepped."""

    reference: weakref.ref[torch.optim.Optimizer]
    first: weakref.ref[torch.Tensor]
    parameters: frozenset[int]
    stateful: bool


class OwnershipProbe:
    """Remembers the optimizers that stepped, without keeping them alive."""

    def __init__(self, record: RecordWriter, clock: StepClock, models: list[weakref.ref[torch.nn.Module]]) -> None:
        self.record = record
        self.clock = clock
        self.models = models
        self.known: list[_Known] = []
        self.seen: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self.recreated = 0
        self._next_look = FIRST_STEP
        self._confirmed = 0
        self._place = ""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: is it one that was not there before?"""
        reference = self.seen.get(id(optimizer))
        if reference is not None and reference() is optimizer:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not parameters:
            return
        ids = frozenset(map(id, parameters))
        state = has_state(optimizer, parameters)
        lost = [
            known
            for known in self.known
            if known.reference() is None and known.stateful and known.first() is not None and known.parameters & ids
        ]
        if lost and state and not was_loaded(optimizer, parameters):
            self.recreated += 1
            name = type(optimizer).__name__
            evidence = f"the last one is of {name}, at step {self.clock.steps:,}"
            self.record.observe(RECREATED_RULE, name, evidence, self.recreated)
        self.known = [known for known in self.known if known.reference() is not None][-MOST_KEPT:]
        reference = weakref.ref(optimizer)
        self.known.append(_Known(reference, weakref.ref(parameters[0]), ids, state))
        if len(self.seen) >= MOST_KEPT:
            self.seen.clear()
        self.seen[id(optimizer)] = reference
        self._next_look = max(self._next_look, self.clock.steps + EVERY_STEPS)  # a new owner: look again, later
        self._confirmed = 0

    def living(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped and still exist."""
        return [optimizer for known in self.known if (optimizer := known.reference()) is not None]

    def step_end(self) -> None:
        """During a look an optimizer has stepped: are there gradients that nobody uses?"""
        step = self.clock.steps
        if step < self._next_look or not self.known:
            return
        owned: set[int] = set()
        for optimizer in self.living():  # groups are added later
            owned.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        unused, total, place = self._unused(owned)
        if total and unused / total >= LEAST_SHARE:
            self._confirmed += 1
            if self._confirmed >= CONFIRMATIONS:
                self._say(place, unused, f"{unused / total:.0%} of the bytes of all gradients")
        else:
            self._confirmed = 0
            if self._place:
                self.record.observe(UNUSED_RULE, self._place, "they are used now", 0.0)
        self._next_look = step + (EVERY_STEPS if self._confirmed < CONFIRMATIONS and step < 128 else SELDOM_STEPS)

    def _say(self, place: str, unused: int, evidence: str) -> None:
        self._place = self._place or place
        self.record.observe(UNUSED_RULE, self._place, evidence, unused)

    def _unused(self, owned: set[int]) -> tuple[int, int, str]:
        """Bytes of gradients that no optimizer uses, of all of them, and where the former are."""
        unused = total = 0
        sizes: dict[str, int] = {}
        for known in self.models:
            model = known()
            for path, parameter in () if model is None else model.named_parameters():
                gradient = parameter.grad
                if gradient is None or gradient.layout != torch.strided:
                    continue
                total += gradient.nbytes
                if id(parameter) not in owned:
                    unused += gradient.nbytes
                    top = folded(path.rpartition(".")[0]).partition(".*")[0] or "the model itself"
                    top = path.partition(".")[0] if top == "*" else top  # a layer of a sequence has no other name
                    sizes[top] = sizes.get(top, 0) + gradient.nbytes
        named = sorted(sizes, key=lambda top: -sizes[top])[:3]
        return unused, total, ", ".join(named)


def has_state(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    """Whether it remembers something of each element: momentum, moments."""
    for parameter in parameters[:8]:
        for item in (optimizer.state.get(parameter) or {}).values():
            if isinstance(item, torch.Tensor) and item.numel() > 1:
                return True
    return False


def was_loaded(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    """Whether its state goes back further than its own first step: it was taken over."""
    for parameter in parameters[:8]:
        step = (optimizer.state.get(parameter) or {}).get("step")
        if isinstance(step, (int, float)):
            return step > 1
        if isinstance(step, torch.Tensor) and step.device.type == "cpu":
            return float(step) > 1
    return False
