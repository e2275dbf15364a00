"""What the search for leaks may cost, on a heap of a million objects, and what it leaves behind."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch_hooks import attach as attaching
from gpuwatch_hooks import leaks as searching
from gpuwatch_hooks.leaks import LeakProbe
from tests.loops import loader_of, perceptron

pytestmark = pytest.mark.usefixtures("records")


class Node:
    """One of very many."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parts = [number, [number], {"inner": (number,)}]


def heap() -> dict[str, Any]:
    """More than a million objects that a search could go through, in containers of every shape."""
    nodes = [Node(number) for number in range(140_000)]
    return {
        "nodes": nodes,
        "by number": {node.number: node for node in nodes},
        "pairs": deque((number, [number]) for number in range(150_000)),
        "bag": {(number,) for number in range(150_000)},
        "named": {f"name {number}": [number] for number in range(60)},
        "deep": [[[[[number] for _ in range(4)] for _ in range(4)] for _ in range(4)] for number in range(500)],
        "modules": nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(1500))),
    }


def watched(steps: int, collected: list[torch.Tensor], **everything: Any) -> LeakProbe:
    """The probe of a loop that has all this in its variables."""
    model, loader = perceptron(), loader_of(steps)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader)
    assert attaching._active is not None
    probe = attaching._active.session.leaks
    for inputs, _targets in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        collected.append(torch.zeros(128, 128))
    watch.detach()
    return probe


def test_a_million_objects_cost_no_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[int] = []
    account = LeakProbe._account

    def accounted(probe: LeakProbe, nanoseconds: int) -> None:
        spent.append(nanoseconds)
        account(probe, nanoseconds)

    collections: list[str] = []
    monkeypatch.setattr(LeakProbe, "_account", accounted)
    everything = heap()
    gc.collect()
    monkeypatch.setattr(gc, "collect", lambda *generation: collections.append("called"))
    before = len(gc.get_objects())
    assert before > 1_000_000
    collected: list[torch.Tensor] = []
    probe = watched(300, collected, **everything)
    assert len(spent) >= 3 and not collections
    assert min(spent) < searching.ONE_SEARCH_NANOSECONDS * 1.25, spent  # on a busy machine some take longer
    assert max(spent) < searching.LONG_NANOSECONDS, spent
    seconds = (monotonic_ns() - probe.began) * searching.SHARE
    assert probe.spent < searching.ALLOWANCE_NANOSECONDS + seconds + searching.LONG_NANOSECONDS
    assert len(probe.points) <= searching.MOST_NAMES


def test_a_search_that_took_longer_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(searching, "LONG_NANOSECONDS", 1)
    probe = watched(20, [])
    assert probe.searches and "a search for leaks took" in caplog.text


def test_names_that_come_and_go_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MOST_NAMES", 50)
    monkeypatch.setattr(searching, "EVERY_AT_FIRST", 1)
    monkeypatch.setattr(searching, "ALLOWANCE_NANOSECONDS", 1 << 40)
    registry = {f"stage {number}": {"outputs": [torch.zeros(2)]} for number in range(60)}
    probe = watched(100, [], registry=registry)
    assert probe.searches > 40 and 20 < len(probe.points) <= 50


def test_nothing_is_kept_after_a_search(records: Path) -> None:
    kept: list[Any] = []
    probe = watched(70, [], kept=kept)
    thing = torch.zeros(4)
    kept.append(thing)
    gone = weakref.ref(thing)
    count = sys.getrefcount(thing)
    frame = sys._getframe()
    probe.clock.steps += 1_000
    probe.look(frame, searching.Surroundings())
    assert probe.searches and sys.getrefcount(thing) == count
    kept.clear()
    del thing
    assert gone() is None
