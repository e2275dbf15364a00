"""What the hooks themselves take is no part of the user's step."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.catalog import PHASE_SECONDS, PHASES
from gpuwatch.expr import series_key
from gpuwatch_hooks import session
from tests.loops import epochs, loader_of, perceptron

pytestmark = pytest.mark.usefixtures("records")

STEPS = 60
OWN_SECONDS = 0.02


@pytest.mark.parametrize("optimizer", [True, False], ids=["with an optimizer", "updated by hand"])
@pytest.mark.parametrize("work", ["search", "tick"])
def test_slow_hooks_do_not_make_steps_long(work: str, optimizer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def slow(_: session.Session) -> None:
        nonlocal calls
        calls += 1
        time.sleep(OWN_SECONDS)

    monkeypatch.setattr(session, work, slow)
    monkeypatch.setattr(session, "TICK_NANOSECONDS", 0)
    model, loader = perceptron(), loader_of(STEPS)
    update = torch.optim.SGD(model.parameters(), 0.01) if optimizer else None
    watch = gpuwatch.attach(model, loader)
    for _, _, (inputs, targets) in epochs(loader, STEPS):
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if update is not None:
            update.step()
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.01 * parameter.grad)
    assert watch._run is not None
    values = watch._run.session.snapshot().values
    watch.detach()
    told = sum(values.get(series_key(PHASE_SECONDS.name, {"phase": phase}), 0.0) for phase in PHASES)
    assert calls >= STEPS // 3
    assert told < calls * OWN_SECONDS / 2, "most of the time was the hooks' own"
