"""What is known of one loader that is watched: what it is set to, its epochs, the cost of its batches.

A loader that is built anew over the same data set (each epoch, each step) goes on where its predecessor ended.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Iterator
from typing import Any

from gpuwatch.catalog import (
    LOADER_BATCH,
    LOADER_BATCH_CPU_SECONDS,
    LOADER_BATCH_SECONDS,
    LOADER_DATASET_ITEMS,
    LOADER_ITEM_SECONDS,
    LOADER_ORDER_SECONDS,
    LOADER_PART_SECONDS,
    LOADER_PERSISTENT,
    LOADER_PINNING,
    LOADER_PREFETCH,
    LOADER_READY,
    LOADER_RECEIVE_CPU_SECONDS,
    LOADER_WORKERS,
)
from gpuwatch.expr import Metric
from gpuwatch_hooks.batches import Batches
from gpuwatch_hooks.disguise import original_class, undo
from gpuwatch_hooks.parts import FetchParts, median_seconds, quantiles
from gpuwatch_hooks.settings import flag, items, setting, whole
from gpuwatch_hooks.workers import Made, Workers

Reading = tuple[tuple[str, str], float]
"""A gauge: the metric's name, the value of its label (or nothing), its value."""

FEWEST = 8
"""Batches below which their cost is not told."""

FEWEST_EPOCHS = 2
"""Epochs below which it is not told what the order of one costs."""

QUANTILES = ("0.1", "0.25", "0.5", "0.75", "0.9", "0.99")


class LoaderWatch:
    """One watched loader. ``given`` tells whether the user named it; others are found when they are iterated."""

    def __init__(self, loader: object, given: bool) -> None:
        self.given = given
        self.first = True  # the next batch is the first of an epoch
        self.feeds: bool | None = None  # whether training steps come of its batches; None while that is not known
        self.training = given  # as far as is known, its batches are trained on, by the thread that asks for them
        self.apart = True  # its next batch is not simply noted between looks
        self.thread: int | None = None  # that asked it last
        self.elsewhere = False  # it is iterated on another thread than that which trains
        self.clocked = False  # the fetch that is running is on the step clock
        self.passes = 0  # batches in a row that nothing was trained on
        self.fed = self.fed_before = 0  # batches that were; as many of them when readings were last written
        self.waited = 0.0  # usual wait for one of its batches, in nanoseconds
        self.epochs = 0
        self.starting: int | None = None  # the wait for an epoch's first batch, while its use is not known
        self.built = 1
        self.sourced = False  # an iterator of torch's was made in this epoch
        self.opening = 0  # nanoseconds spent in __iter__, part of the first wait
        self.iterator_classes: dict[tuple[type, bool], type] = {}
        self.iterators: list[weakref.ref[Any]] = []
        self.elements: float | None = None
        self.varying = False  # batches differ in size: each step's is noted
        self.differing = False  # they do, and not the last of an epoch alone
        self.odd = False  # the last batch was of another size than those before
        self.workers = Workers()
        self.parts = FetchParts()
        self.batches = Batches()
        self.dataset: weakref.ref[object] | None = None
        self.take_over(loader)

    def take_over(self, loader: object) -> None:
        """Go on with this loader: the first one, or one that was built in its place."""
        self.loader = weakref.ref(loader)
        dataset = setting(loader, "dataset")
        self.dataset = weakref.ref(dataset) if hasattr(type(dataset), "__weakref__") else None
        self.number: int | None = None
        self.batch_size: int | None = None
        self.prefetch: int | None = None
        self.items: int | None = None
        self.persistent: bool | None = None
        self.pinning: bool | None = None
        self.collates = False
        self.context: Any = None  # that starts its workers; None for the usual one
        self.learn(loader)
        self.kind: tuple[type, int | None] = (type(dataset), self.items)

    def learn(self, loader: object) -> None:
        """Take down what it is set to, as far as that is not known: of the loader itself, then of the one within."""
        context = setting(loader, "multiprocessing_context")
        self.context = self.context if context is None else context
        if self.number is None:
            self.number = whole(setting(loader, "num_workers"))
            self.batch_size = whole(setting(loader, "batch_size"))
            self.prefetch = whole(setting(loader, "prefetch_factor"))
            self.persistent = flag(setting(loader, "persistent_workers"))
            self.pinning = flag(setting(loader, "pin_memory"))
            self.collates = setting(loader, "batch_sampler") is not None
        if self.items is None:
            self.items = items(loader)

    def same_data(self, other: LoaderWatch) -> bool:
        """Whether the other one loads the same data set; or one like it, where one of both is gone."""
        mine, its = self.dataset and self.dataset(), other.dataset and other.dataset()
        return mine is its if mine is not None and its is not None else self.kind == other.kind

    def begin_epoch(self) -> None:
        """An iterator is asked for: its first batch is a case apart."""
        self.first = self.apart = True
        self.opening = 0

    def asked_by(self, thread: int | None, training: int | None) -> None:
        """It is asked on this thread, while that one trains; None where it is not known."""
        self.thread = thread
        self.elsewhere = None not in (thread, training) and thread != training
        self._place()

    def _place(self) -> None:
        known = self.feeds or (self.feeds is None and self.given)
        self.training = bool(known) and not self.elsewhere
        self.apart = self.first or not self.training

    def settle(self) -> None:
        """The next batch is one like any other."""
        self.first = False
        self._place()

    def saw(self, trained: bool) -> int | None:
        """A batch was trained on, or the next one was asked for without that.

        Returns the wait for the first batch of the epoch, if this is the first one that was trained on.
        """
        started = None
        if trained:
            started, self.starting = self.starting, None
            self.fed += 1
            self.passes = 0
            self.feeds = True
        else:
            self.passes += 1
            if not self.feeds or self.passes >= 3:
                self.feeds = False
        self._place()
        return started

    def succeed(self, earlier: LoaderWatch) -> None:
        """Go on where another loader of the same data ended, which still exists."""
        self.built = earlier.built + 1
        self.epochs += earlier.epochs
        self.waited = earlier.waited
        self.parts.take(earlier.parts)
        self.workers.take(earlier.workers)
        self.iterators = earlier.iterators + self.iterators
        earlier.iterators = []

    def living(self) -> list[Any]:
        """Its iterators that still exist."""
        found = [(known, iterator) for known in self.iterators if (iterator := known()) is not None]
        self.iterators = [known for known, _ in found]
        return [iterator for _, iterator in found]

    def add_iterator(self, iterator: object) -> None:
        """An iterator of torch's was made for it."""
        self.sourced = True
        self.living()
        self.iterators.append(weakref.ref(iterator))

    def source(self, iterator: object) -> object:
        """Where the batches come from: torch's iterator, which may be inside another."""
        born = self.iterators[-1]() if self.iterators else None
        return iterator if born is None else born

    def forgettable(self) -> bool:
        """Whether nothing more will come of it."""
        return self.loader() is None and not self.living()

    def restore(self) -> None:
        """Give the loader its class back, and the iterators that are in use."""
        self.given = False
        for living in (self.loader(), *self.living()):
            if original_class(type(living)) is not None:
                undo(living)

    def note_wait(self, wait: int) -> None:
        """A batch that was not the first of an epoch came after this time."""
        self.waited += (wait - self.waited) / 16

    # -- readings ----------------------------------------------------------------------------------------------------

    def readings(self) -> Iterator[Reading]:
        """Every gauge that is known."""
        recent = self.workers.tick()
        yield from self._settings()
        made = self.workers.made() if self.number else list(self.parts.made)
        if len(made) >= FEWEST:
            yield from self._costs(made)
        cpu = recent.cpu / recent.batches if recent.batches else None
        if not self.number and len(self.parts.cpu) >= FEWEST:
            cpu = statistics.fmean(self.parts.cpu)
        if cpu is not None:
            yield (LOADER_BATCH_CPU_SECONDS.name, ""), cpu / 1e9
        yield from self._way()
        for name, value in (*self.workers.readings(recent), *self.batches.readings()):
            yield (name, ""), value

    def _settings(self) -> Iterator[Reading]:
        settings: tuple[tuple[Metric, float | None], ...] = (
            (LOADER_WORKERS, self.number),
            (LOADER_PREFETCH, self.prefetch),
            (LOADER_DATASET_ITEMS, self.items),
            (LOADER_PERSISTENT, self.persistent),
            (LOADER_PINNING, self.pinning),
        )
        for metric, number in settings:
            if number is not None:
                yield (metric.name, ""), float(number)

    def _costs(self, made: list[Made]) -> Iterator[Reading]:
        if self.number or self.parts.split:
            yield _part("items"), median_seconds([one[0] for one in made])
            yield _part("collate"), median_seconds([one[1] for one in made])
        whole = [items + collate for items, collate, _ in made]
        for quantile, seconds in quantiles(whole, QUANTILES):
            yield (LOADER_BATCH_SECONDS.name, quantile), seconds

    def _way(self) -> Iterator[Reading]:
        parts = self.parts
        if len(parts.ready) >= FEWEST:
            yield (LOADER_READY.name, ""), sum(parts.ready) / len(parts.ready)
        if len(parts.transfer) >= FEWEST:
            yield _part("transfer"), median_seconds(list(parts.transfer))
        if len(parts.pinning) >= FEWEST:
            yield _part("pin"), median_seconds(list(parts.pinning))
        if len(parts.sampler.batches) >= FEWEST:
            yield _part("sampler"), median_seconds(list(parts.sampler.batches))
        if len(parts.sampler.starts) >= FEWEST_EPOCHS:
            yield (LOADER_ORDER_SECONDS.name, ""), median_seconds(list(parts.sampler.starts))
        if len(parts.receive_cpu) >= FEWEST:
            yield (LOADER_RECEIVE_CPU_SECONDS.name, ""), median_seconds(list(parts.receive_cpu))

    def size_readings(self) -> Iterator[Reading]:
        """Items of a batch, and what one costs where batches are made of several."""
        made = self.workers.made() if self.number else list(self.parts.made)
        size = self.batch_size or (statistics.median(one[2] for one in made) if made and self.collates else None)
        if size:
            yield (LOADER_BATCH.name, ""), size
            if len(made) >= FEWEST:
                yield (
                    (LOADER_ITEM_SECONDS.name, ""),
                    median_seconds([(one[0] + one[1]) // max(1, one[2]) for one in made]),
                )


def _part(part: str) -> tuple[str, str]:
    return LOADER_PART_SECONDS.name, part
