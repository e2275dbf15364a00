"""Every kind of thing that can hold tensors is named when it leaks, and its sound twin is quiet."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from gpuwatch.advisor import Finding
from gpuwatch_hooks import leaks as searching
from tests.holders import CASES, FEATURES, Twin
from tests.loops import AfterStep, loader_of, perceptron, train

pytestmark = pytest.mark.usefixtures("records", "unhurried")

STEPS = 150
LEAKS = ("leak-graph-retained", "leak-tensors", "leak-host", "leak-cyclic", "leak-device")


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches within a larger budget: a busy machine's cost more, and the budget has its own tests."""
    monkeypatch.setattr(searching, "ALLOWANCE_NANOSECONDS", 1_000_000_000)


def leaks(after: AfterStep, steps: int = STEPS, **options: Any) -> list[Finding]:
    """The leak findings of a loop that does this after each step."""
    options.setdefault("loader", loader_of(steps, 16, FEATURES))
    options.setdefault("model", perceptron(FEATURES))
    return [finding for finding in train(steps, after=after, **options) if finding.rule in LEAKS]


@pytest.fixture
def thawed() -> Iterator[None]:
    """What a test froze is collected again."""
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize(("twin", "name"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_holder_is_named_with_its_growth_and_its_place(twin: Twin, name: str) -> None:
    findings = leaks(twin(True))
    found = [finding for finding in findings if name in finding.where]
    assert found, [(finding.rule, finding.where, finding.evidence) for finding in findings]
    assert " a step" in found[0].evidence and ".py" in found[0].where


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize("twin", [case[0] for case in CASES], ids=[case[0].__name__ for case in CASES])
def test_its_sound_twin_is_quiet(twin: Twin) -> None:
    assert not leaks(twin(False))
