"""What a handler of a signal, or another thread, raises while a hook of ours runs is the user's, and arrives."""

from __future__ import annotations

import _thread
import ast
import ctypes
import functools
import gc
import operator
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gpuwatch
from gpuwatch.interruption import expected
from gpuwatch_hooks import guard
from gpuwatch_hooks.guard import faults, guarded
from tests.programs import ROOT


class Late(TimeoutError):
    """Something took too long. An OSError, as every TimeoutError is."""


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


class Called:
    """A handler that is an object."""

    def __call__(self, number: int, frame: object) -> None:
        raise Late


def replaced(*arguments: object) -> None:
    """A handler that puts another one in its place before its exception arrives."""
    signal.signal(signal.SIGUSR1, late)
    raise Late


HANDLERS: dict[str, Callable[..., None]] = {
    "function": late,
    "method": Limit().over,
    "part": functools.partial(with_reason, "slow"),
    "object": Called(),
    "replaced": replaced,
}


@pytest.fixture(params=list(HANDLERS.values()), ids=list(HANDLERS))
def handler(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


@guarded("interrupted")
def interrupted() -> None:
    """A hook during which the signal comes."""
    signal.raise_signal(signal.SIGUSR1)


@guarded("interrupted")
def reading() -> None:
    """A hook that reads a file which need not be there, during which the signal comes."""
    try:
        signal.raise_signal(signal.SIGUSR1)
    except expected(OSError, ValueError):
        return


@guarded("broken")
def broken() -> None:
    """A fault of our own."""
    raise Late


@pytest.mark.parametrize("hook", [interrupted, reading])
def test_the_exception_of_a_handler_passes_the_guard(hook: Callable[[], None], handler: object) -> None:
    for _ in range(4):  # and switches nothing off
        with pytest.raises(Late):
            hook()
    assert "interrupted" not in faults()


class OwnLate(Exception):
    """What a time limit of another thread raises."""


def test_what_another_thread_makes_appear_in_a_hook_passes_the_guard() -> None:
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    throw.argtypes = (ctypes.c_ulong, ctypes.py_object)
    ours: dict[str, Any] = {"__name__": "gpuwatch_hooks.made", "times": range(9)}
    ours["throw"] = functools.partial(throw, threading.get_ident(), OwnLate)
    exec("def hook():\n    throw()\n    for _ in times: pass", ours)
    with pytest.raises(OwnLate):
        guarded("interrupted")(ours["hook"])()
    assert "interrupted" not in faults()


@pytest.mark.faults_expected
def test_the_same_exception_of_our_own_does_not(handler: object) -> None:
    guard.reset()
    broken()
    assert faults()["broken"] == 1


def test_a_file_that_is_not_there_is_expected(handler: object, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        try:
            (tmp_path / "none").read_text()
        except expected(ValueError):
            pass
    try:
        raise caught.value
    except expected(OSError, ValueError):
        pass


def test_no_hook_takes_an_error_of_the_system_for_its_own() -> None:
    broad = {"OSError", "RuntimeError", "TimeoutError", "ConnectionError", "InterruptedError"}
    for path in (ROOT / "hooks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name | ast.Tuple):
                named = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
                assert not named & broad, f"{path.name}:{node.lineno}: except gpuwatch.interruption.expected(...)"


class Ring:
    """Goes in a collection."""

    def __init__(self) -> None:
        self.itself = self


class Interrupting(weakref.ref[Ring]):
    """Called in a collection, with no instruction of Python, it makes a signal come."""

    come: Any = functools.partial(_thread.interrupt_main, signal.SIGINT)


def interrupt_a_collection() -> None:
    """As Ctrl-C does that is pressed meanwhile."""
    garbage = Ring()
    reference = Interrupting(garbage, operator.methodcaller("come"))
    del garbage
    gc.collect()
    sys.intern("the program goes on")
    assert reference() is None


def test_what_a_signal_raises_during_a_collection_arrives(records: Path) -> None:
    others = gc.callbacks[:]
    gc.callbacks.clear()  # others' listeners (hypothesis has one) would lose it, and so would destructors
    gc.collect()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with gpuwatch.attach(nn.Linear(1, 1)) as watch:
            for times in (1, 2, 3):
                with pytest.raises(KeyboardInterrupt):
                    interrupt_a_collection()
                gc.collect()
                session = watch._run.session  # type: ignore[union-attr]
                assert session.pauses.count >= times, "and it listens on"
    finally:
        signal.signal(signal.SIGINT, before)
        gc.callbacks.extend(others)
    assert sys.getprofile() is None
