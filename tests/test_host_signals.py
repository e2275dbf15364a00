"""What a handler of a signal raises while a hook of ours runs is the user's, and arrives."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpuwatch_hooks.guard import faults, guarded


class Late(Exception):
    """Something took too long."""


def late(number: int, frame: object) -> None:
    """As a user's time limit does."""
    raise Late


class Limit:
    """A handler that is a method."""

    def over(self, number: int, frame: object) -> None:
        raise Late


def with_reason(reason: str, number: int, frame: object) -> None:
    """A handler that is given more."""
    raise Late(reason)


@pytest.fixture(params=[late, Limit().over, functools.partial(with_reason, "slow")], ids=["function", "method", "part"])
def handler(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


@guarded("interrupted")
def interrupted() -> None:
    """A hook during which the signal comes."""
    signal.raise_signal(signal.SIGUSR1)


@guarded("broken")
def broken() -> None:
    """A fault of our own."""
    raise Late


def test_the_exception_of_a_handler_passes_the_guard(handler: object) -> None:
    for _ in range(4):  # and switches nothing off
        with pytest.raises(Late):
            interrupted()
    assert "interrupted" not in faults()


@pytest.mark.faults_expected
def test_the_same_exception_of_our_own_does_not(handler: object) -> None:
    broken()
    assert faults()["broken"] == 1
