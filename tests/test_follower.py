"""A record that is followed says what a fresh read says, and only what changed is read."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from gpuwatch import follower as following
from gpuwatch.catalog import GUARD_FAULTS, OBSERVATION, STEP_BOUNDS, STEP_SECONDS
from gpuwatch.follower import Follower, Lines
from gpuwatch.layout import OBSERVATIONS_AT, RECORD_BYTES, SCHEMA_AT, VALUES_AT, Word
from gpuwatch.rankseries import RankSeries, Vetted, published, rank_series, vetted
from gpuwatch.reader import RecordError, parse
from gpuwatch.record import RecordWriter
from tests.recorded import row, write_run

Following = Follower[Vetted | None]


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's own lock is nobody's: say that the record is held."""
    monkeypatch.setattr(following, "leased", lambda file: True)


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    made = write_run(tmp_path, steps=300, state=None, observations=[("debug-anomaly", "train.py:3", "on", 60.0)])
    for bound in (*(f"{bound:g}" for bound in STEP_BOUNDS), "+Inf"):
        made.values[made.counter(f"{STEP_SECONDS.name}_bucket", le=bound)] = 3
    made.values[made.counter(f"{STEP_SECONDS.name}_sum")] = 12.5
    return made


def followed(path: Path) -> Following:
    return Follower(path, Lines(vetted))


def said(follower: Following) -> RankSeries:
    look = follower.look()
    return published(look.head, look.series, look.numbers, look.observations, look.gauges)


def lasting(series: RankSeries) -> dict[tuple[str, tuple[str, ...]], float]:
    """All but ages, which grow between two looks."""
    return {(metric.name, own): number for metric, own, number in series.series if "age_seconds" not in metric.name}


def fresh(writer: RecordWriter) -> RankSeries:
    data = bytes(writer.buffer)
    return rank_series(parse(writer.path, os.getuid(), True, lambda size, at: data[at : at + size]))


def same(follower: Following, writer: RecordWriter) -> None:
    one, other = said(follower), fresh(writer)
    assert lasting(one) == pytest.approx(lasting(other))
    assert (one.histogram, one.dropped) == (other.histogram, other.dropped)


def test_it_says_what_a_fresh_read_says_however_the_record_changes(
    writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "ADVICE_SECONDS", 0.0)
    follower = followed(writer.path)
    same(follower, writer)
    writer.values[writer.series(GUARD_FAULTS.name, probe="memory")] = 1
    writer.values[writer.series("gpuwatch_no_such_metric")] = 1
    same(follower, writer)
    writer.observe("debug-anomaly", "train.py:3", "on", 61.0)
    writer.observe("leak-list", "train.py:9", "list", 1e6)
    same(follower, writer)
    for number in range(301, 2600):
        writer.step_row(*row(number, number * 0.1, {"data": 0.05 + number % 7 * 0.001, "forward": 0.02}))
    writer.words[Word.STEP] = 2600
    same(follower, writer)
    writer.values[writer.series("gpuwatch_loader_workers")] = float("nan")
    same(follower, writer)


def test_an_unchanged_record_costs_three_reads_and_its_observations(
    writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = followed(writer.path)
    said(follower)
    sizes: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, at: int) -> bytes:
        sizes.append(size)
        return pread(file, size, at)

    monkeypatch.setattr(os, "pread", counted)
    said(follower)
    assert len(sizes) == 3 and sum(sizes) < 4096


def test_gauges_of_steps_wait_when_they_are_not_asked_for(writer: RecordWriter) -> None:
    follower = followed(writer.path)
    assert follower.look(afresh=False).gauges == ()
    gauges = follower.look().gauges
    assert gauges
    writer.step_row(*row(301, 99.0, {"data": 3.0}))
    assert follower.look(afresh=False).gauges == gauges
    assert follower.look().gauges != gauges


def test_an_observation_that_is_being_rewritten_stays_as_it_was(writer: RecordWriter) -> None:
    follower = followed(writer.path)
    assert [seen.magnitude for seen in follower.look().observations] == [60.0]
    writer.buffer[OBSERVATIONS_AT : OBSERVATIONS_AT + 8] = struct.pack("=Q", 7)
    writer.buffer[OBSERVATIONS_AT + 16 : OBSERVATIONS_AT + 24] = struct.pack("=d", 1.0)
    assert [seen.magnitude for seen in follower.look().observations] == [60.0]
    writer.buffer[OBSERVATIONS_AT : OBSERVATIONS_AT + 8] = struct.pack("=Q", 8)
    assert [seen.magnitude for seen in follower.look().observations] == [1.0]


def test_a_schema_that_shrinks_or_goes_wrong_is_refused(writer: RecordWriter) -> None:
    follower = followed(writer.path)
    said(follower)
    used = writer.words[Word.SCHEMA_USED]
    writer.words[Word.SCHEMA_USED] = used - 5
    with pytest.raises(RecordError, match="it shrinks"):
        follower.look()
    writer.buffer[SCHEMA_AT + used : SCHEMA_AT + used + 5] = b"[[[[["
    writer.words[Word.SCHEMA_USED] = used + 5
    for _ in range(2):
        with pytest.raises(RecordError, match="holds no valid schema"):
            follower.look()


def test_no_damage_while_it_is_followed_does_anything_but_refuse_it(writer: RecordWriter) -> None:
    chance = random.Random(11)
    words = [0, 1, 2**63, 2**64 - 1, *struct.unpack("=3Q", struct.pack("=3d", float("inf"), float("nan"), -1e300))]
    sound = bytes(writer.buffer)
    refused = taken = 0
    for _ in range(200):
        follower = followed(writer.path)
        writer.buffer[:RECORD_BYTES] = sound
        said(follower)
        for _ in range(chance.choice((1, 3, 30))):
            at = 8 * chance.choice((chance.randrange(2, 16), chance.randrange(VALUES_AT // 8, RECORD_BYTES // 8)))
            writer.buffer[at : at + 8] = struct.pack("=Q", chance.choice((*words, chance.getrandbits(64))))
        try:
            said(follower)
            taken += 1
        except RecordError:
            refused += 1
    assert refused > 20 and taken > 20


def test_lines_that_many_ranks_share_are_taken_apart_once() -> None:
    calls: list[str] = []
    lines: Lines[str] = Lines(lambda name, labels: calls.append(name) or name)  # type: ignore[func-returns-value]
    for _ in range(8):
        assert lines.parse('["a", {"b": "c"}]') == ('a{b="c"}', "a")
    assert calls == ["a"]
    with pytest.raises(ValueError):
        lines.parse("[1]")


def test_observations_are_no_series_of_a_record() -> None:
    assert vetted(OBSERVATION.name, {"rule": "run-dead", "where": ""}) == (None, ())
