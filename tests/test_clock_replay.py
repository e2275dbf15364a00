"""Steps that were only noted: replayed, they come to the same as steps that were looked at."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

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
from gpuwatch.history import is_split
from gpuwatch.layout import Column, Word
from gpuwatch.reader import Snapshot
from gpuwatch_hooks import attach as attaching
from gpuwatch_hooks import clock, loader, optimizers
from tests.scripted import Loop, Model, Optimizer, Script


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """A collection of the interpreter's own would tag a step of one run and not of the other."""
    gc.disable()
    yield
    gc.enable()


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


def train_for_a_while(loop: Loop, rest: bool, networks: int) -> Snapshot:
    """300 steps in uneven epochs with evaluations, of one network or two."""
    judge = Model(loop.time, forward=50_000, backward=60_000)
    second = Optimizer(judge.parameters(), loop.time, 7_000)
    batches = loop.loader(50)
    loop.attach(batches, rest=rest)
    if networks == 2:
        loop.second = gpuwatch.attach(judge, batches)
    for epoch in range(6):
        for inputs, _ in batches:
            loop.step(inputs)
            if networks == 2:
                judge(inputs).sum().backward()
                second.step()
        if epoch % 2:
            loop.evaluate(4)
    return loop.end()


@pytest.mark.parametrize("networks", [1, 2])
def test_steps_that_were_only_noted_come_to_the_same_as_steps_looked_at(loop: Loop, networks: int) -> None:
    live = train_for_a_while(loop, rest=False, networks=networks)
    noted = train_for_a_while(Loop(loop.time), rest=True, networks=networks)
    assert sum(map(is_split, live.ring)) == 300
    assert 64 <= sum(map(is_split, noted.ring)) < 150
    assert noted.step == live.step == 300
    assert len(noted.ring) == len(live.ring) == 300
    for phase, seconds in phases(live).items():
        assert phases(noted)[phase] == pytest.approx(seconds, rel=1e-6), phase
    for metric in (BATCHES, EPOCH_STARTS, EPOCH_RESTARTS, EVALUATION_FORWARDS):
        assert noted.values[metric.name] == live.values[metric.name], metric.name
    for metric in (EPOCH_START_SECONDS, EPOCH_RESTART_SECONDS, EVALUATION_SECONDS, BETWEEN_SECONDS):
        assert nanoseconds(noted, metric.name) == nanoseconds(live, metric.name), metric.name
    for column in (Column.NUMBER, Column.TOTAL, Column.DATA, Column.EPOCH_START, Column.TAGS):
        assert [row[column] for row in noted.ring] == pytest.approx([row[column] for row in live.ring], nan_ok=True)
    histogram = [key for key in live.values if key.startswith(STEP_SECONDS.name)]
    assert [noted.values[key] for key in histogram] == pytest.approx([live.values[key] for key in histogram])


def test_looks_do_not_beat_with_the_run(loop: Loop) -> None:
    batches = loop.loader(511)
    loop.attach(batches)
    for inputs, _ in batches:
        loop.step(inputs)
    looked = [int(row[Column.NUMBER]) for row in loop.end().ring if is_split(row)]
    late = [number for number in looked if number > 64]
    assert len(late) >= 8
    for period in (2, 3, 4, 5, 8, 10, 16, 32):
        most = max(sum(number % period == rest for number in late) for rest in range(period))
        assert most < 0.75 * len(late), f"steps {late} fall together with what happens every {period} steps"


def test_the_step_count_is_that_of_the_run_at_any_time(loop: Loop) -> None:
    batches = loop.loader(200)
    loop.attach(batches)
    assert attaching._active is not None
    words = attaching._active.session.record.words
    for number, (inputs, _) in enumerate(batches):
        assert words[Word.STEP] == number
        loop.step(inputs)
