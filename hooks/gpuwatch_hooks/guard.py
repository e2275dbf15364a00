"""The one place where an exception of ours is stopped.

Everything that torch or the user's program calls into goes through :func:`guarded`. It lets KeyboardInterrupt and
SystemExit pass, and what a handler of a signal or another thread raises while we happen to run. It logs a probe's first
fault with its traceback, counts all of them, and switches the probe off after three, so that a broken probe costs a
call and nothing else.

Meanwhile ``__torch_function__`` is off: what we ask a tensor calls no method of its class, and no mode counts it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from torch._C import DisableTorchFunction as _Plain

from gpuwatch.interruption import from_outside

P = ParamSpec("P")
R = TypeVar("R")

LIMIT = 3
"""Faults after which a probe is off for the rest of the process (or until the next run begins)."""

log = logging.getLogger("gpuwatch")

POINTS: dict[str, list[Point]] = {}
"""Every guarded point by probe: what fault injection goes through."""

listeners: list[Callable[[str, int], None]] = []
"""Told of every fault, as (probe, faults so far); the run's record counts them."""


class Point:
    """One guarded function. ``run`` is what is called: the function itself, or nothing once its probe is off."""

    __slots__ = ("function", "probe", "run")

    def __init__(self, probe: str, function: Callable[..., object]) -> None:
        self.probe = probe
        self.function = function
        self.run = function


_faults: dict[str, int] = {}


def guarded(probe: str) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Guard a function as part of ``probe``; it returns None when it failed or is off."""

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        point = Point(probe, function)
        POINTS.setdefault(probe, []).append(point)
        # A fixed number of arguments saves packing and unpacking a tuple at every event of a step.
        count = function.__code__.co_argcount
        wrap = (_no_argument, _one_argument, _two_arguments, _three_arguments)[min(count, 3)]
        call = wrap(point) if count <= 3 else _any_arguments(point)
        return cast("Callable[P, R | None]", functools.update_wrapper(call, function))

    return decorate


def faults() -> dict[str, int]:
    """Faults so far by probe."""
    return dict(_faults)


def reset() -> None:
    """All probes on again, no faults: a new run begins."""
    _faults.clear()
    for points in POINTS.values():
        for point in points:
            point.run = point.function


def _no_argument(point: Point) -> Callable[..., object]:
    def call() -> object:
        try:
            with _Plain():
                return point.run()
        except Exception as fault:  # noqa: BLE001 - the host program must not see our faults
            return _stopped(point, fault)

    return call


def _one_argument(point: Point) -> Callable[..., object]:
    def call(first: object) -> object:
        try:
            with _Plain():
                return point.run(first)
        except Exception as fault:  # noqa: BLE001
            return _stopped(point, fault)

    return call


def _two_arguments(point: Point) -> Callable[..., object]:
    def call(first: object, second: object) -> object:
        try:
            with _Plain():
                return point.run(first, second)
        except Exception as fault:  # noqa: BLE001
            return _stopped(point, fault)

    return call


def _three_arguments(point: Point) -> Callable[..., object]:
    def call(first: object, second: object, third: object) -> object:
        try:
            with _Plain():
                return point.run(first, second, third)
        except Exception as fault:  # noqa: BLE001
            return _stopped(point, fault)

    return call


def _any_arguments(point: Point) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        try:
            with _Plain():
                return point.run(*arguments)
        except Exception as fault:  # noqa: BLE001
            return _stopped(point, fault)

    return call


def _off(*_: object) -> None:
    return None


def _stopped(point: Point, fault: Exception) -> object:
    if from_outside(fault):
        raise fault
    count = _faults[point.probe] = _faults.get(point.probe, 0) + 1
    if count >= LIMIT:
        for other in POINTS[point.probe]:
            other.run = _off
    try:
        if count == 1:
            words = "gpuwatch's probe %s failed; training goes on without what it sees"
            log.warning(words, point.probe, exc_info=fault)
        for listener in listeners:
            listener(point.probe, count)
    except Exception:  # noqa: BLE001 - a user's log handler may raise too
        return None
    return None
