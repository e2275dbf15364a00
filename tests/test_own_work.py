"""A rank's own work goes by the steps that were looked at, however rare they are, and forgets soon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch.catalog import OWN_SECONDS, OWN_STEP_SECONDS
from gpuwatch.expr import series_key
from gpuwatch.layout import State
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.distributed import unhindered
from gpuwatch_hooks.ledger import BACKWARD, DATA, FORWARD, LOOKED_STEPS, OTHER, Ledger
from gpuwatch_hooks.ownwork import OwnWork

MILLISECOND = 1_000_000


@pytest.fixture
def record(tmp_path: Path) -> Iterator[RecordWriter]:
    writer = RecordWriter(tmp_path, {"run": "r", "rank": 0})
    yield writer
    writer.close(State.CLEAN)


def write(ledger: Ledger, first: int, count: int, forward: int, every: int = 1) -> None:
    """Steps of which one in ``every`` was looked at, with this many milliseconds of forward."""
    for number in range(first, first + count):
        spent = [0] * 9
        spent[DATA], spent[OTHER] = 2 * MILLISECOND, 10 * MILLISECOND
        if number % every == 0:
            spent[FORWARD], spent[BACKWARD] = forward * MILLISECOND, 5 * MILLISECOND
        ledger.step(spent, number, number, fetched=True, unseen=False, gc_nanoseconds=0, elements=1.0)


def forward_of(record: RecordWriter) -> float:
    return record.snapshot().values[series_key(OWN_SECONDS.name, {"phase": "forward"})]


def test_a_rank_that_is_slow_no_more_is_seen_to_be_by_rare_looks(record: RecordWriter) -> None:
    ledger = Ledger(record)
    own = OwnWork(record, ledger.looked)
    write(ledger, 1, 64, forward=20)
    own.publish({})
    assert forward_of(record) == pytest.approx(0.020)
    write(ledger, 65, 32 * (3 * LOOKED_STEPS // 4), forward=1, every=32)
    own.publish({})
    assert forward_of(record) == pytest.approx(0.001)


@pytest.mark.parametrize("block", [1, 2, 5, 20])
def test_a_rank_that_is_slow_by_turns_takes_as_long_as_its_mean_step(block: int, record: RecordWriter) -> None:
    ledger = Ledger(record)
    for number in range(11, 91):
        write(ledger, number, 1, forward=20 if number // block % 2 else 4)
        if number >= 55 and block < 20:
            OwnWork(record, ledger.looked).publish({})
            assert forward_of(record) == pytest.approx(0.012, abs=0.0025)
    OwnWork(record, ledger.looked).publish({})
    assert forward_of(record) == pytest.approx(0.012, abs=0.0025)


def test_now_and_then_a_long_step_is_not_the_usual_one(record: RecordWriter) -> None:
    ledger = Ledger(record)
    for number in range(11, 91):
        write(ledger, number, 1, forward=900 if number % 10 == 0 else 4)
    OwnWork(record, ledger.looked).publish({})
    assert forward_of(record) == pytest.approx(0.004)


def test_the_sum_is_of_what_is_known(record: RecordWriter) -> None:
    ledger = Ledger(record)
    own = OwnWork(record, ledger.looked)
    write(ledger, 1, 64, forward=20)
    own.publish({"backward": None})
    assert record.snapshot().values[OWN_STEP_SECONDS.name] == pytest.approx(0.032)


def test_a_few_steps_say_nothing(record: RecordWriter) -> None:
    ledger = Ledger(record)
    write(ledger, 1, 25, forward=20)
    OwnWork(record, ledger.looked).publish({})
    assert OWN_STEP_SECONDS.name not in record.snapshot().values


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_of_ranks_that_are_slow_by_turns_the_waits_are_not_the_networks(ranks: int) -> None:
    exchanges = [(0.002 if step % ranks == 0 else 0.022, 0.001) for step in range(16)]
    assert unhindered(exchanges) == (0.002, 0.001)
    assert unhindered([(0.05, 0.01)] * 3) == (0.05, 0.01)
