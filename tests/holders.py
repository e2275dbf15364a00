"""What can hold tensors: twins of a step's work, one that leaks and one that does not."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import logging
import queue
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.loops import AfterStep

FEATURES = 32

Twin = Callable[[bool], AfterStep]
"""Makes what a loop does after each step: the fault where it is called with True, its sound twin with False."""

kept_globally: list[torch.Tensor] = []


def wide() -> torch.Tensor:
    """A tensor of 64 KiB."""
    return torch.zeros(128, 128)


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


class Sample:
    """A key that can be referred to weakly."""


def weak_keys_that_never_die(leaks: bool) -> AfterStep:
    features: weakref.WeakKeyDictionary[Sample, torch.Tensor] = weakref.WeakKeyDictionary()
    samples: list[Sample] = []

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        sample = Sample()
        features[sample] = wide()
        if leaks:
            samples.append(sample)

    return after


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        self.leaks = leaks
        self.records: list[object] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.records.append(record if self.leaks else record.levelno)


def log_records(leaks: bool) -> AfterStep:
    log = logging.getLogger("a program's")
    log.handlers = [Records(leaks)]
    log.propagate = False
    return lambda step, output, loss: log.warning("logits %s", wide())


class Slotted:
    """Without a dictionary."""

    __slots__ = ("items", "last")

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None


def slots(leaks: bool) -> AfterStep:
    slotted = Slotted()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        slotted.last = wide()
        if leaks:
            slotted.items.append(slotted.last)

    return after


def work_queue(leaks: bool) -> AfterStep:
    results: queue.Queue[torch.Tensor] = queue.Queue()

    def after(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        results.put(wide())
        if not leaks:
            results.get()

    return after


@dataclass
class Episode:
    """What a policy keeps of a step."""

    actions: list[torch.distributions.Distribution] = field(default_factory=list)


def distributions(leaks: bool) -> AfterStep:
    episode = Episode()

    def kept(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        episode.actions.append(torch.distributions.Normal(wide(), 1.0))

    def started_anew(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        kept(step, output, loss)
        if len(episode.actions) > 15:
            episode.actions = []

    return kept if leaks else started_anew


def copies_of_the_model(leaks: bool) -> AfterStep:
    snapshots: list[nn.Module] = []

    def every_fifth(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if step % 5 == 0:
            snapshots.append(nn.Sequential(nn.Linear(256, 256)))

    def last_two(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        every_fifth(step, output, loss)
        del snapshots[:-2]

    return every_fifth if leaks else last_two


def partial(leaks: bool) -> AfterStep:
    def collect(into: list[torch.Tensor], step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        into.append(wide())

    def replace(into: list[torch.Tensor], step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        into.append(wide())
        into.pop(0)

    return functools.partial(collect if leaks else replace, [])


def namespace_object(leaks: bool) -> AfterStep:
    state = types.SimpleNamespace(outputs=[])

    def kept(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        state.outputs.append(wide())

    def replaced(step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        state.outputs = [wide()]

    return kept if leaks else replaced


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
    (default_argument, "remember.__defaults__"),
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
