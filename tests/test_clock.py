"""The step clock on real loops whose time is scripted: every phase to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.catalog import (
    BATCHES,
    BETWEEN_SECONDS,
    EPOCH_RESTART_SECONDS,
    EPOCH_RESTARTS,
    EPOCH_START_SECONDS,
    EPOCH_STARTS,
    EVALUATION_FORWARDS,
    EVALUATION_SECONDS,
    PHASE_SECONDS,
    PHASES,
    STEP_SECONDS,
)
from gpuwatch.expr import series_key
from gpuwatch.layout import Column, Tag
from gpuwatch.reader import Snapshot
from gpuwatch_hooks import clock, loader, optimizers
from tests.scripted import BACKWARD, EVALUATION, FORWARD, LOG, LOSS, OPEN, STEP, WAIT, Loop, Model, Optimizer, Script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, records: object) -> Script:
    time = Script()
    for module in (clock, loader, optimizers):
        monkeypatch.setattr(module, "monotonic_ns", time)
    return time


@pytest.fixture
def loop(script: Script) -> Iterator[Loop]:
    made = Loop(script)
    yield made
    if made.watch is not None:
        made.watch.detach()


def nanoseconds(snapshot: Snapshot, name: str, **labels: str) -> int:
    return round(snapshot.values.get(series_key(name, labels), 0.0) * 1e9)


def phases(snapshot: Snapshot) -> dict[str, int]:
    return {phase: nanoseconds(snapshot, PHASE_SECONDS.name, phase=phase) for phase in PHASES}


def expected(steps: int, data: int = WAIT, forwards: int = 1, per_step: int = 1) -> dict[str, int]:
    return {
        "data": steps * data,
        "forward": steps * forwards * FORWARD,
        "backward": steps * forwards * BACKWARD,
        "optimizer": steps * per_step * STEP,
        "other": steps * (forwards * LOSS + per_step * LOG),
    }


def test_a_plain_loop(loop: Loop) -> None:
    batches = loop.loader(10)
    loop.attach(batches)
    for _ in range(3):
        for inputs, _ in batches:
            loop.step(inputs)
    seen = loop.end()
    # The first batch of an epoch is waited for apart.
    assert phases(seen) == {**expected(30), "data": 27 * WAIT}
    assert nanoseconds(seen, EPOCH_START_SECONDS.name) == 3 * (OPEN + WAIT)
    assert nanoseconds(seen, EPOCH_RESTART_SECONDS.name) == 2 * (OPEN + WAIT)
    assert (seen.values[EPOCH_STARTS.name], seen.values[EPOCH_RESTARTS.name]) == (3, 2)
    assert (seen.step, seen.values[BATCHES.name], len(seen.ring)) == (30, 30, 30)
    assert [int(row[Column.NUMBER]) for row in seen.ring if int(row[Column.TAGS]) & Tag.EPOCH_START] == [1, 11, 21]
    assert seen.values[f"{STEP_SECONDS.name}_sum"] * 1e9 == pytest.approx(sum(phases(seen).values()))


def test_a_row_of_the_ring_is_one_step(loop: Loop) -> None:
    batches = loop.loader(3)
    loop.attach(batches)
    for inputs, _ in batches:
        loop.step(inputs)
    row = loop.end().ring[1]
    cells = {column.name: round(row[column] * 1e9) for column in Column if column not in (Column.NUMBER, Column.TAGS)}
    assert cells["TOTAL"] == WAIT + FORWARD + LOSS + BACKWARD + STEP + LOG
    assert (cells["DATA"], cells["FORWARD"], cells["BACKWARD"], cells["OPTIMIZER"]) == (WAIT, FORWARD, BACKWARD, STEP)
    assert row[Column.ELEMENTS] == 4


def test_accumulation_is_one_step_of_several_batches(loop: Loop) -> None:
    batches = loop.loader(41)
    loop.attach(batches)
    stream = iter(batches)
    next(stream)  # the first batch of an epoch, for nothing
    for number in range(40):
        inputs, _ = next(stream)
        loop.train_on(inputs)
        if number % 4 == 3:
            loop.optimizer.step()
            loop.time.spend(LOG)
    seen = loop.end()
    assert phases(seen) == expected(10, data=4 * WAIT, forwards=4)
    assert (seen.step, seen.values[BATCHES.name]) == (10, 41)


def test_two_optimizers_of_one_batch_are_one_step(loop: Loop) -> None:
    judge = Model(loop.time, forward=50_000, backward=60_000)
    second = Optimizer(judge.parameters(), loop.time, 7_000)
    batches = loop.loader(20)
    loop.attach(batches)
    loop.second = gpuwatch.attach(judge, batches)
    for inputs, _ in batches:
        loop.step(inputs)
        judge(inputs).sum().backward()
        second.step()
    seen = loop.end()
    assert phases(seen) == {
        "data": 19 * WAIT,
        "forward": 20 * (FORWARD + 50_000),
        "backward": 20 * (BACKWARD + 60_000),
        "optimizer": 20 * (STEP + 7_000),
        "other": 20 * (LOSS + LOG),
    }
    assert (seen.step, len(seen.ring)) == (20, 20)


def test_several_steps_on_one_batch_are_counted_each(loop: Loop) -> None:
    batches = loop.loader(10)
    loop.attach(batches)
    for inputs, _ in batches:
        for _ in range(3):
            loop.step(inputs)
    seen = loop.end()
    assert phases(seen) == {**expected(30), "data": 9 * WAIT}
    assert (seen.step, len(seen.ring)) == (30, 30)


def test_a_closure_belongs_to_its_optimizer_step(loop: Loop) -> None:
    optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=3)
    batches = loop.loader(8)
    loop.attach(batches)
    for inputs, _ in batches:

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = loop.model(inputs).square().sum()
            loop.time.spend(LOSS)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        loop.time.spend(LOG)
    seen, calls = loop.end(), loop.model.calls
    assert calls > 8
    assert phases(seen) == {
        "data": 7 * WAIT,
        "forward": calls * FORWARD,
        "backward": calls * BACKWARD,
        "optimizer": calls * LOSS,  # what the closure does besides
        "other": 8 * LOG,
    }
    assert seen.step == 8


def test_without_a_loader_a_step_ends_with_the_next_one(loop: Loop) -> None:
    loop.attach()
    for _ in range(20):
        loop.time.spend(WAIT)
        loop.step(torch.ones(2, 2))
    seen = loop.end()
    waits = phases(seen)["other"]
    assert phases(seen) == {**expected(20), "data": 0, "other": waits}
    assert waits == 20 * (WAIT + LOSS + LOG)
    assert series_key(PHASE_SECONDS.name, {"phase": "data"}) not in seen.values, "unknown is not zero"
    assert seen.step == len(seen.ring) == 20
    assert [row[Column.ELEMENTS] for row in seen.ring] == [4] * 20, "from the model's input"


def test_without_an_optimizer_a_batch_is_a_step(loop: Loop) -> None:
    batches = loop.loader(100)
    loop.attach(batches)
    for inputs, _ in batches:
        loop.train_on(inputs)
    seen = loop.end()
    assert 60 <= seen.step <= 100
    assert phases(seen)["forward"] + phases(seen)["backward"] >= seen.step * (FORWARD + BACKWARD)
    assert phases(seen)["optimizer"] == 0


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("where", ["end of epoch", "after the step", "before the forward", "after the backward"])
def test_an_evaluation_is_kept_apart_wherever_it_is(loop: Loop, where: str, rest: bool) -> None:
    batches = loop.loader(50)
    loop.attach(batches, rest=rest)
    for _ in range(4):
        for number, (inputs, _) in enumerate(batches):
            now = number % 25 == 24
            if now and where == "before the forward":
                loop.evaluate(4)
            loop.train_on(inputs)
            if now and where == "after the backward":
                loop.evaluate(4)
            loop.optimizer.step()
            loop.time.spend(LOG)
            if now and where == "after the step":
                loop.evaluate(4)
        if where == "end of epoch":
            loop.evaluate(8)
    seen = loop.end()
    assert nanoseconds(seen, EVALUATION_SECONDS.name) == 8 * EVALUATION
    assert seen.values[EVALUATION_FORWARDS.name] == 32
    measured = phases(seen)
    assert measured["data"] == 196 * WAIT
    assert sum(measured.values()) == pytest.approx(sum(expected(200).values()) - 4 * WAIT, abs=5)
    if not rest:
        assert measured == {**expected(200), "data": 196 * WAIT}


def test_an_evaluation_with_gradients_is_kept_apart(loop: Loop) -> None:
    batches = loop.loader(30)
    loop.attach(batches)
    for number, (inputs, _) in enumerate(batches):
        if number % 10 == 5:  # before the step's own forward, and after an optimizer step
            loop.model.eval()
            loop.model(inputs)
            loop.model(inputs)
            loop.model.train()
        loop.step(inputs)
        if number % 10 == 8:
            loop.model.eval()
            loop.model(inputs)
            loop.model.train()
    seen = loop.end()
    assert phases(seen) == {**expected(30), "data": 29 * WAIT}
    assert nanoseconds(seen, EVALUATION_SECONDS.name) == 9 * FORWARD


@pytest.mark.parametrize("in_eval_mode", [True, False])
def test_an_evaluation_over_the_watched_loader_is_no_training(loop: Loop, in_eval_mode: bool) -> None:
    batches = loop.loader(10)
    loop.attach(batches)
    for _ in range(2):
        for inputs, _ in batches:
            loop.step(inputs)
        loop.model.train(not in_eval_mode)
        with torch.no_grad():
            for inputs, _ in batches:
                loop.model(inputs)
        loop.model.train()
    seen = loop.end()
    assert phases(seen) == {**expected(20), "data": 18 * WAIT}
    assert nanoseconds(seen, EVALUATION_SECONDS.name) == 2 * (OPEN + 10 * WAIT + 10 * FORWARD)
    assert seen.step == 20


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("in_eval_mode", [True, False])
def test_a_second_loader_that_is_watched_too_is_not_charged_to_training(
    loop: Loop, in_eval_mode: bool, rest: bool
) -> None:
    batches, validation = loop.loader(50), loop.loader(5, wait=1_000_000)
    loop.attach([batches, validation], rest=rest)
    for _ in range(4):
        for number, (inputs, _) in enumerate(batches):
            loop.step(inputs)
            if number % 25 == 24:
                loop.model.train(not in_eval_mode)
                with torch.no_grad():
                    for pixels, _ in validation:
                        loop.model(pixels)
                loop.model.train()
    seen = loop.end()
    assert phases(seen)["data"] == 196 * WAIT
    assert nanoseconds(seen, EVALUATION_SECONDS.name) >= 8 * 5 * 1_000_000
    assert seen.step == 200


def test_a_model_trained_in_eval_mode_trains(loop: Loop) -> None:
    loop.model.eval()
    batches = loop.loader(30)
    loop.attach(batches)
    for inputs, _ in batches:
        loop.time.spend(LOSS)  # to the device, say
        loop.step(inputs)
    seen = loop.end()
    assert phases(seen) == {**expected(30), "data": 29 * WAIT, "other": 30 * (2 * LOSS + LOG)}
    assert nanoseconds(seen, EVALUATION_SECONDS.name) == 0


def test_a_model_trained_in_eval_mode_without_a_loader_trains(loop: Loop) -> None:
    loop.model.eval()
    loop.attach()
    for _ in range(20):
        loop.step(torch.ones(2, 2))
    seen = loop.end()
    assert phases(seen) == {**expected(20), "data": 0}
    assert nanoseconds(seen, EVALUATION_SECONDS.name) == 0


def test_a_teacher_in_the_step_is_part_of_it(loop: Loop) -> None:
    batches = loop.loader(20)
    loop.attach(batches)
    for inputs, _ in batches:
        with torch.no_grad():
            loop.model(inputs)
        loop.step(inputs)
    seen = loop.end()
    assert phases(seen) == {**expected(20), "data": 19 * WAIT, "forward": 40 * FORWARD}
    assert nanoseconds(seen, EVALUATION_SECONDS.name) == 0


def test_a_backward_inside_a_forward_leaves_the_rest_of_it_a_forward(loop: Loop) -> None:
    class Twice(nn.Module):
        def __init__(self, below: Model) -> None:
            super().__init__()
            self.below = below

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            inputs = inputs.clone().requires_grad_()
            energy = self.below(inputs)
            torch.autograd.grad(energy.sum(), inputs, create_graph=True)
            self.below.time.spend(11_000)
            return torch.as_tensor(energy)

    model = Twice(loop.model)
    batches = loop.loader(10)
    watch = gpuwatch.attach(model, batches)
    for inputs, _ in batches:
        model(inputs).sum().backward()
        loop.optimizer.step()
    watch.detach()
    assert watch._last is not None
    assert phases(watch._last) == {
        "data": 9 * WAIT,
        "forward": 10 * (FORWARD + 11_000),
        "backward": 20 * BACKWARD,
        "optimizer": 10 * STEP,
        "other": 0,
    }


def test_what_lies_between_epochs_is_no_step(loop: Loop) -> None:
    batches = loop.loader(10)
    loop.attach(batches)
    loop.time.spend(33_000)
    for _ in range(2):
        for inputs, _ in batches:
            loop.step(inputs)
        loop.time.spend(77_000)
    seen = loop.end()
    assert phases(seen) == {**expected(20), "data": 18 * WAIT}
    assert nanoseconds(seen, BETWEEN_SECONDS.name) == 33_000 + 2 * 77_000
