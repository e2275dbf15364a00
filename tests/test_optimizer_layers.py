"""An optimizer whose step calls its parent's: torch calls the hooks of both, and it is one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.layout import Column
from tests.loops import epochs, loader_of, perceptron

pytestmark = pytest.mark.usefixtures("records")

STEPS = 200


class Clipped(torch.optim.SGD):
    """Clips, then does what its parent does."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        nn.utils.clip_grad_norm_([parameter for group in self.param_groups for parameter in group["params"]], 1.0)
        return super().step(closure)


class Twice(Clipped):
    """A layer more, and a helper in between."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        return self._inner(closure)

    def _inner(self, closure: Any) -> Any:
        return super().step(closure)


@pytest.fixture(params=["one of them", "all of them"])
def wrapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch has wrapped the parents' steps too, as it does when one is instantiated."""
    if request.param == "all of them":
        for kind in (torch.optim.SGD, Clipped):
            kind(nn.Linear(1, 1).parameters(), 0.1)
        return True
    for kind in (torch.optim.SGD, Clipped, Twice):
        step = vars(kind)["step"]
        monkeypatch.setattr(kind, "step", getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step)
    return False


@pytest.mark.parametrize("kind", [Clipped, Twice])
def test_a_step_within_a_step_is_counted_once(kind: type[torch.optim.SGD], wrapped: bool) -> None:
    model, loader = perceptron(), loader_of(STEPS)
    optimizer = kind(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for step, _, (inputs, targets) in epochs(loader, STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if step == 40:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
        optimizer.step()
    assert watch._run is not None
    snapshot = watch._run.session.snapshot()
    watch.detach()
    assert snapshot.step == STEPS
    looked = [row for row in snapshot.ring if row[Column.OPTIMIZER] == row[Column.OPTIMIZER]]
    assert looked and all(row[Column.OPTIMIZER] > 0 for row in looked)


def test_a_parent_that_is_wrapped_later_is_seen_at_the_next_look() -> None:
    model, loader = perceptron(), loader_of(STEPS)
    optimizer = Twice(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    for step, _, (inputs, targets) in epochs(loader, STEPS):
        if step == 30:
            Clipped(nn.Linear(1, 1).parameters(), 0.1)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert watch._run is not None
    assert watch._run.session.snapshot().step == STEPS
    watch.detach()
