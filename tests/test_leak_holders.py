"""Every kind of thing that can hold tensors is named when it leaks, and its sound twin is quiet."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpuwatch.advisor import Finding
from gpuwatch_hooks import leaks as searching
from tests.holders import (
    FEATURES,
    Twin,
    copies_of_the_model,
    distributions,
    log_records,
    namespace_object,
    partial,
    slots,
    weak_keys_that_never_die,
    wide,
    work_queue,
)
from tests.loops import AfterStep, loader_of, perceptron, train

pytestmark = pytest.mark.usefixtures("records", "unhurried")

STEPS = 150
LEAKS = ("leak-graph-retained", "leak-tensors", "leak-host", "leak-cyclic", "leak-device")

kept_globally: list[torch.Tensor] = []


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches within a larger budget: a busy machine's cost more, and the budget has its own tests."""
    monkeypatch.setattr(searching, "ALLOWANCE_NANOSECONDS", 1_000_000_000)


def leaks(after: AfterStep, steps: int = STEPS, **options: Any) -> list[Finding]:
    """The leak findings of a loop that does this after each step."""
    options.setdefault("loader", loader_of(steps, 16, FEATURES))
    options.setdefault("model", perceptron(FEATURES))
    return [finding for finding in train(steps, after=after, **options) if finding.rule in LEAKS]


def variable(leaks: bool) -> AfterStep:
    kept: list[torch.Tensor] = []

    def trimmed(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        kept.append(wide())
        kept[:] = kept[-3:]

    return (lambda step, output, loss: kept.append(wide())) if leaks else trimmed


def global_variable(leaks: bool) -> AfterStep:
    kept_globally.clear()
    return lambda step, output, loss: kept_globally.append(wide() if leaks else wide()[0].clone())


def unbounded_deque(leaks: bool) -> AfterStep:
    ring: collections.deque[torch.Tensor] = collections.deque(maxlen=None if leaks else 100)
    return lambda step, output, loss: ring.append(wide())


def set_of_tensors(leaks: bool) -> AfterStep:
    bag: set[torch.Tensor] = set()

    def trimmed(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        bag.add(wide())
        if len(bag) > 10:
            bag.pop()

    return (lambda step, output, loss: bag.add(wide())) if leaks else trimmed


class Tracker:
    """Keeps tensors where a class can keep them."""

    everything: list[torch.Tensor] = []  # noqa: RUF012 - the fault

    def __init__(self) -> None:
        self.nested: dict[str, dict[str, list[torch.Tensor]]] = {"train": {"loss": []}}
        self.by_class: dict[int, collections.deque[torch.Tensor]] = collections.defaultdict(collections.deque)
        self.bank = torch.zeros(0, 128)

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033 - the fault
    def encoded(self, step: int) -> torch.Tensor:
        """A tensor a step."""
        return wide()

    @functools.lru_cache(maxsize=100)  # noqa: B019
    def encoded_lately(self, step: int) -> torch.Tensor:
        """A tensor a step, of the last hundred."""
        return wide()


def class_attribute(leaks: bool) -> AfterStep:
    Tracker.everything.clear()
    return lambda step, output, loss: Tracker.everything.append(wide() if leaks else torch.zeros(1))


def nested_dictionaries(leaks: bool) -> AfterStep:
    tracker = Tracker()

    def cleared(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        tracker.nested["train"]["loss"].append(wide())
        if step % 20 == 19:
            tracker.nested["train"]["loss"].clear()

    return (lambda step, output, loss: tracker.nested["train"]["loss"].append(wide())) if leaks else cleared


def queue_for_each_class(leaks: bool) -> AfterStep:
    tracker = Tracker()

    def trimmed(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        tracker.by_class[step * 7 % 40].append(wide())
        if len(tracker.by_class[step * 7 % 40]) > 2:
            tracker.by_class[step * 7 % 40].popleft()

    return (lambda step, output, loss: tracker.by_class[step * 7 % 40].append(wide())) if leaks else trimmed


def joined(leaks: bool) -> AfterStep:
    tracker = Tracker()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        tracker.bank = torch.cat([tracker.bank if leaks else tracker.bank[-256:], wide()])

    return after


def cached_function(leaks: bool) -> AfterStep:
    @functools.lru_cache(maxsize=None if leaks else 128)
    def positions(step: int) -> torch.Tensor:
        return wide()

    return lambda step, output, loss: positions(step)


def cached_by_tensor(leaks: bool) -> AfterStep:
    @functools.cache
    def table(key: object) -> torch.Tensor:
        return wide()

    return lambda step, output, loss: table(wide() if leaks else 3)


def cached_method(leaks: bool) -> AfterStep:
    tracker = Tracker()
    Tracker.encoded.cache_clear()
    Tracker.encoded_lately.cache_clear()
    return lambda step, output, loss: (tracker.encoded if leaks else tracker.encoded_lately)(step)


def default_argument(leaks: bool) -> AfterStep:
    def remember(tensor: torch.Tensor, memory: list[torch.Tensor] = []) -> int:  # noqa: B006 - the fault
        memory.append(tensor if leaks else tensor[:1, :1].clone())
        return len(memory)

    return lambda step, output, loss: remember(wide())


def function_attribute(leaks: bool) -> AfterStep:
    def log(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        log.history.append(wide() if leaks else 0.0)  # type: ignore[attr-defined]

    log.history = []  # type: ignore[attr-defined]
    return log


def generator(leaks: bool) -> AfterStep:
    def mean_of_all() -> Iterator[float]:
        window: list[torch.Tensor] = []
        while True:
            window.append(wide())
            yield float(len(window))

    def mean_of_five() -> Iterator[float]:
        window: list[torch.Tensor] = []
        while True:
            window.append(wide())
            del window[:-5]
            yield float(len(window))

    mean = mean_of_all() if leaks else mean_of_five()
    return lambda step, output, loss: next(mean)


def kept_exception(leaks: bool) -> AfterStep:
    errors: list[object] = []

    def judge(activations: torch.Tensor) -> None:
        if activations is not None:
            raise ValueError("not finite")

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        try:
            judge(wide())
        except ValueError as error:
            errors.append(error if leaks else str(error))

    return after


def numpy_view(leaks: bool) -> AfterStep:
    rows: list[Any] = []
    return lambda step, output, loss: rows.append(wide().numpy()[0] if leaks else wide().numpy()[0].copy())


def numpy_arrays(leaks: bool) -> AfterStep:
    predictions: dict[int, Any] = {}
    return lambda step, output, loss: predictions.update({step if leaks else 0: wide().numpy().copy()})


def cycle(leaks: bool) -> AfterStep:
    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield wide()

    batches = itertools.cycle(endless()) if leaks else endless()
    return lambda step, output, loss: next(batches)


def tee(leaks: bool) -> AfterStep:
    ahead, behind = itertools.tee(wide() for _ in itertools.count())

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        next(ahead)
        if not leaks and step > 5:
            next(behind)

    return after


def frozen_heap(leaks: bool) -> AfterStep:
    kept: list[torch.Tensor] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        kept.append(wide() if leaks else loss.detach())
        if step == 2:
            gc.freeze()

    return after


CASES: list[tuple[Twin, str]] = [
    (variable, "kept"),
    (global_variable, "kept_globally"),
    (unbounded_deque, "ring"),
    (set_of_tensors, "bag"),
    (class_attribute, "Tracker.everything"),
    (nested_dictionaries, "tracker.nested['train']['loss']"),
    (queue_for_each_class, "tracker.by_class"),
    (joined, "tracker.bank"),
    (cached_function, "positions"),
    (cached_by_tensor, "table"),
    (cached_method, "Tracker.encoded"),
    (default_argument, "remember.__defaults__:memory"),
    (function_attribute, "after.history"),
    (generator, "mean:window"),
    (kept_exception, "errors"),
    (numpy_view, "rows"),
    (numpy_arrays, "predictions"),
    (cycle, "batches<cycle>"),
    (tee, "behind"),
    (frozen_heap, "kept"),
    (weak_keys_that_never_die, "features"),
    (log_records, "records"),
    (slots, "slotted.items"),
    (work_queue, "results.queue"),
    (distributions, "episode.actions"),
    (copies_of_the_model, "snapshots"),
    (partial, "after.args[0]"),
    (namespace_object, "state.outputs"),
]


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
