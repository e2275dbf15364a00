"""Nothing of the user's is kept alive, nothing piles up, and detach puts everything back."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch
from gpuwatch import config
from gpuwatch.advisor import Finding
from gpuwatch_hooks import attach as door
from gpuwatch_hooks import session
from tests.trainings import perceptron

ENDED = 64
"""Steps after which not every step is looked at."""


class Loop:
    """A training that goes on for as many steps as asked for."""

    def __init__(self, batches: int = 10_000) -> None:
        self.model = perceptron()
        self.loader = DataLoader(TensorDataset(torch.randn(batches, 6), torch.rand(batches, 1)), 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.batch: Any = None
        self.output: Any = None

    def run(self, steps: int) -> None:
        """Train."""
        iterator = iter(self.loader)
        for _ in range(steps):
            self.batch = next(iterator)
            self.output = self.model(self.batch[0])
            loss = self.output.square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def fingerprint(loop: Loop) -> dict[str, object]:
    """Everything that attaching and looking touches."""
    modules = [module for root in (loop.model,) for module in root.modules()]
    return {
        "autograd": {name: getattr(torch.autograd, name) for name in ("backward", "grad", "_engine_run_backward")},
        "module": dict(vars(nn.Module)),
        "exit": sys.exit,
        "model": dict(vars(type(loop.model))),
        "hooks": [
            {name: dict(hooks) for name, hooks in vars(module).items() if name.endswith(("hooks", "kwargs", "called"))}
            for module in modules
        ],
        "attributes": [set(vars(module)) for module in modules],
        "optimizer": (dict(optimizers._global_optimizer_pre_hooks), dict(optimizers._global_optimizer_post_hooks)),
        "optimizer's own": dict(vars(type(loop.optimizer))),
        "loader": (type(loop.loader), dict(vars(loop.loader)), dict(vars(DataLoader))),
        "collector": list(gc.callbacks),
        "compile": torch.compile,
        "script": dict(vars(torch.jit._recursive)),
        "graphs": torch.cuda.make_graphed_callables,
    }


@pytest.mark.parametrize("steps", [0, 5, ENDED + 20])
def test_detach_puts_everything_back(steps: int, records: Path) -> None:
    loop = Loop()
    before = fingerprint(loop)
    files = set(os.listdir("/proc/self/fd"))
    watch = gpuwatch.attach(loop.model, loop.loader)
    assert fingerprint(loop) != before
    loop.run(steps)
    watch.detach()
    after = fingerprint(loop)
    for what, expected in before.items():
        assert after[what] == expected, what
    assert set(os.listdir("/proc/self/fd")) == files
    watch.detach()
    assert watch.findings() is not None


def test_an_iterator_in_use_goes_on_as_itself_after_detach(records: Path) -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), 1, num_workers=1, persistent_workers=True)
    with gpuwatch.attach(nn.Linear(1, 1), loader):
        iterator = iter(loader)
        kind = type(iterator)
        next(iterator)
        assert type(iterator).__name__ == "_MultiProcessingDataLoaderIter"
    assert type(iterator) is not kind
    assert type(iterator) is torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    assert len(list(iterator)) == 7
    with gpuwatch.attach(nn.Linear(1, 1), loader) as watch:
        assert len(list(loader)) == 8
        assert watch._run is not None and watch._run.session.clock.batches == 8, "its waits are the new run's"


def test_leaving_the_block_by_an_exception_detaches_and_passes_it_on(records: Path) -> None:
    loop = Loop()
    before = fingerprint(loop)
    with pytest.raises(ZeroDivisionError), gpuwatch.attach(loop.model, loop.loader):
        loop.run(3)
        _ = 1 / 0
    assert fingerprint(loop) == before


def test_findings_can_be_asked_for_at_any_time(records: Path) -> None:
    loop = Loop()
    watch = gpuwatch.attach(loop.model, loop.loader)
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(4):
            loop.run(30)
            found: list[Finding] = watch.findings()
    assert "debug-anomaly" in {finding.rule for finding in found}


def test_attaching_and_detaching_again_and_again_leaves_nothing(records: Path) -> None:
    loop = Loop()

    def once() -> None:
        with gpuwatch.attach(loop.model, loop.loader):
            loop.run(2)

    def census() -> tuple[int, int, int]:
        gc.collect()
        return len(gc.get_objects()), len(os.listdir("/proc/self/fd")), len(session._alive)

    for _ in range(3):
        once()
    objects, files, sessions = census()
    for _ in range(50):
        once()
    later = census()
    assert later[1:] == (files, sessions)
    assert later[0] - objects < 200, "50 runs leave fewer than four objects each"
    for _ in range(config.KEPT_RECORDS - 40):
        once()
    assert len(list(records.glob("*.gpw"))) <= config.KEPT_RECORDS + 1


@pytest.mark.parametrize("steps", [5, ENDED + 40])
@pytest.mark.parametrize("detached", [True, False], ids=["detached", "attached"])
def test_what_the_user_drops_is_gone_at_once(steps: int, detached: bool, records: Path) -> None:
    loop: Loop | None = Loop()
    assert loop is not None
    watch = gpuwatch.attach(loop.model, loop.loader)
    loop.run(steps)
    if detached:
        watch.detach()
    owned = [loop.model, loop.loader, loop.optimizer, loop.batch[0], loop.output, *loop.model.parameters()]
    references = [weakref.ref(thing) for thing in owned]
    collecting = gc.isenabled()
    gc.disable()
    try:
        del owned, loop
        alive = [type(thing).__name__ for reference in references if (thing := reference()) is not None]
    finally:
        if collecting:
            gc.enable()
    # An optimizer is in a cycle of its own making; the rest is freed by its reference count.
    assert [name for name in alive if name != "SGD" and name != "Parameter"] == []
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_run_whose_models_are_gone_gives_way_to_the_next(records: Path) -> None:
    for _ in range(2):
        loop = Loop()
        gpuwatch.attach(loop.model, loop.loader)
        loop.run(3)
        del loop
        gc.collect()
    assert len(list(records.glob("*.gpw"))) == 2
    assert door._active is not None and not door._active.session.ended


def test_memory_does_not_grow_with_the_steps(records: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs = torch.ones(1, 2)

    def batches(count: int) -> Iterator[torch.Tensor]:
        yield from (inputs for _ in range(count))

    class Source:
        """A loader of the user's own."""

        def __init__(self) -> None:
            self.count = 500

        def __iter__(self) -> Iterator[torch.Tensor]:
            return batches(self.count)

    source = Source()

    def run(steps: int) -> None:
        source.count = steps
        for batch in source:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    gpuwatch.attach(model, source)
    run(2_000)
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        run(1_000)
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        run(2_000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()
    run(15_000)
    gc.collect()
    assert grown < 20_000, f"{grown} bytes in 2,000 steps"
    assert len(gc.get_objects()) - objects < 300


def test_a_function_that_kept_its_locals_does_not_see_them_change(records: Path) -> None:
    def train(steps: int, rate: float) -> tuple[dict[str, object], list[str]]:
        arguments = locals()
        at_first = list(arguments)
        loop = Loop()
        gpuwatch.attach(loop.model, loop.loader)
        loop.run(steps)
        return arguments, at_first

    arguments, at_first = train(ENDED + 40, 0.1)
    assert list(arguments) == at_first == ["steps", "rate"]


@pytest.mark.parametrize("make", [lambda: None, lambda: 5, lambda: print, lambda: torch.zeros(2)])
def test_what_is_no_model_is_a_warning_in_one_line(
    make: Callable[[], object], records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = gpuwatch.attach(make())  # type: ignore[arg-type]
    assert isinstance(watch, gpuwatch.Watch)
    assert watch.findings() == [] and watch.run is None
    watch.detach()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "torch.nn.Module was expected" in message and "\n" not in message
    assert not list(records.glob("*"))


def test_what_is_no_loader_or_optimizer_is_a_warning_and_the_model_is_watched(
    records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gpuwatch.attach(perceptron(), 5, optimizer="adam", name=b"x") as watch:  # type: ignore[arg-type]
        assert watch.run == "b'x'"
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(",")[0] for message in messages] == [
        "gpuwatch.attach got a int as loader",
        "gpuwatch.attach got a str as optimizer",
    ]
