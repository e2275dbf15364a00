"""Bytes in use are asked for as often as the answer is cheap, and no oftener."""

from __future__ import annotations

import ctypes
import itertools

import pytest

from gpuwatch_hooks import in_use, session
from gpuwatch_hooks.in_use import AT_FIRST, SHARE, InUse
from tests.loops import found, train


class Clock:
    """Time that only passes where it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the reader sees."""
    clock = Clock()
    monkeypatch.setattr(in_use, "monotonic_ns", clock)
    return clock


def readings(clock: Clock, monkeypatch: pytest.MonkeyPatch, cost: int, step: int, steps: int) -> int:
    """How many of so many steps of a run get an answer, where each answer takes ``cost`` nanoseconds."""

    def ask() -> int:
        clock.now += cost
        return 4096

    monkeypatch.setattr(in_use, "bytes_in_use", ask)
    reader, count = InUse(), 0
    for _ in range(steps):
        clock.now += step
        count += reader.read() is not None
    return count


def test_a_cheap_answer_is_given_at_every_step(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert readings(clock, monkeypatch, cost=8_000, step=10_000_000, steps=10_000) == 10_000


def test_a_dear_answer_takes_no_more_than_its_share(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = 11_000_000
    count = readings(clock, monkeypatch, cost, step=18_000_000, steps=40_000)
    assert (AT_FIRST + SHARE * clock.now) / cost - 1 <= count <= (AT_FIRST + SHARE * clock.now) / cost + 1


def test_a_short_run_is_answered_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert readings(clock, monkeypatch, cost=200_000, step=2_000_000, steps=100) == 100


def test_what_the_allocator_says_follows_what_is_allocated() -> None:
    reader = InUse()
    before = reader.read()
    kept = bytearray(50_000_000)
    after = reader.read()
    if before is None or after is None:
        pytest.skip("this C library has no mallinfo2")
    assert after - before == pytest.approx(len(kept), rel=0.02)


LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]


def read_alone(watched: session.Session) -> None:
    """A reading, and no search for names: it found none."""
    watched.growth.look(watched.varying())
    watched.growth.explain(0.0)


@pytest.mark.parametrize(("readings", "told"), [(1 << 30, True), (15, False)], ids=["to the end", "for a while"])
@pytest.mark.usefixtures("records")
def test_growth_is_told_of_as_long_as_it_is_read(readings: int, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no name leads to. What grew when it was last read, long ago, may have stopped to."""
    monkeypatch.setattr(in_use, "AT_FIRST", 1 << 62)  # a test runner's heap is a large one
    monkeypatch.setattr(session, "search", read_alone)
    left, taken = itertools.repeat(None, readings), []
    read = InUse.read
    monkeypatch.setattr(InUse, "read", lambda self: read(self) if next(left, self) is None else None)
    findings = train(200, after=lambda *_: taken.append(LIBC.malloc(120_000)))
    for block in taken:
        LIBC.free(block)
    assert found(findings, "leak-host") == told
