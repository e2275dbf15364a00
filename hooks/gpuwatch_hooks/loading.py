"""All loaders of a run: which of them training steps come from, and what is published of it.

Loaders need not be given: every one that is iterated in this process is seen. That alone says nothing of what it is
for. A loader is a training loader when a backward or an optimizer step follows its batches before it is asked again; a
validation loader is asked again without. Only a training loader's costs are published.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic_ns

from gpuwatch.catalog import LOADER_SHARE, LOADERS_BUILT, METRICS, WORKER_DEATHS, WORKERS_IDLE
from gpuwatch.layout import Phase, Word
from gpuwatch.record import RecordWriter
from gpuwatch_hooks import deaths
from gpuwatch_hooks.clock import StepClock
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.settings import setting
from gpuwatch_hooks.watchedloader import LoaderWatch

IDLE_NANOSECONDS = 10_000_000_000
"""Time without a fetch after which the workers of a replaced iterator are idle."""

MANY_REPLACED = 3
"""Iterators of one data set made since, from which that is certain at once."""

MOST_LOADERS = 64
RECENT_BATCHES = 64
"""Batches trained on, during looks, by which a loader's share of them is told."""

_NAN = float("nan")


class LoadingProbe:
    """The loaders that are followed."""

    def __init__(self, record: RecordWriter, clock: StepClock, watches: list[LoaderWatch]) -> None:
        self.record = record
        self.clock = clock
        self.watches = watches
        self.inside: LoaderWatch | None = None  # whose fetch, or opening, is running on the step clock
        self.asked: list[LoaderWatch] = []  # whose batches the open step has taken
        self.thread: int | None = None  # that trains
        self.main: LoaderWatch | None = None
        self._fed: deque[LoaderWatch] = deque(maxlen=RECENT_BATCHES)  # whose batches were trained on, of late
        self._written: set[tuple[str, str]] = set()
        self._dead: set[int] = set()

    # -- which is which ----------------------------------------------------------------------------------------------

    def watch_of(self, loader: object) -> LoaderWatch:
        """The watch of a loader: its own, that of one that it replaces, or a new one."""
        for watch in self.watches:
            if watch.loader() is loader:
                return watch
        predecessor = self._predecessor(loader)
        if predecessor is not None:
            predecessor.take_over(loader)
            predecessor.built += 1
            return predecessor
        watch = LoaderWatch(loader, given=False)
        if len(self.watches) >= MOST_LOADERS:
            self.prune()
        if len(self.watches) < MOST_LOADERS:
            self.watches.append(watch)
        return watch

    def _predecessor(self, loader: object) -> LoaderWatch | None:
        gone = [watch for watch in self.watches if watch.loader() is None]
        if not gone:
            return None
        dataset = setting(loader, "dataset")
        for watch in gone:
            if watch.dataset is not None and watch.dataset() is dataset:
                return watch
        fresh = LoaderWatch(loader, given=False)
        alike = [watch for watch in gone if watch.kind == fresh.kind and (watch.dataset is None or not watch.dataset())]
        return alike[0] if len(alike) == 1 else None

    def prune(self) -> None:
        """Let go of loaders that are gone."""
        self.watches[:] = [watch for watch in self.watches if watch is self.main or not watch.forgettable()]

    def admits(self, watch: LoaderWatch) -> bool:
        """Whether what this loader does now belongs on the step clock: not from within another's fetch or thread."""
        if self.inside is not None:
            return False
        watch.asked_by(threading.get_ident(), self.thread)
        if watch.elsewhere or watch.given:
            return not watch.elsewhere
        # Within a fetch between looks, of which only the phase was noted.
        return self.record.words[Word.PHASE] not in (Phase.DATA, Phase.EPOCH_START)

    def trained_here(self) -> None:
        """An optimizer stepped on this thread."""
        thread = threading.get_ident()
        if thread != self.thread:
            self.thread = thread
            for watch in self.watches:
                watch.asked_by(watch.thread, thread)

    def judge(self, watch: LoaderWatch) -> bool:
        """A loader is asked again: what became of the batches before? True when they are of the same step."""
        clock, asked = self.clock, self.asked
        if not self.conclude():
            if watch in asked:
                watch.saw(False)
                if watch.feeds and watch.passes == 1:
                    return True  # a batch ahead, as prefetching loops ask: no evaluation yet
                asked.clear()
            elif asked and clock.evaluated and not clock.trained:
                for evaluated in asked:
                    if not evaluated.given:
                        evaluated.saw(False)
                asked.clear()
        joins = bool(asked)
        asked.append(watch)
        return joins

    def conclude(self) -> bool:
        """Whether something was trained since the last batches came: then they were for that."""
        clock, asked = self.clock, self.asked
        if not clock.stepped and not clock.backwards:
            return False
        for fed in asked:
            earlier = None if fed.fed else self._replaced_by(fed)
            if earlier is not None:
                fed.succeed(earlier)
                self._fed = deque((fed if one is earlier else one for one in self._fed), RECENT_BATCHES)
                if not earlier.given:
                    self.watches.remove(earlier)
            self._fed.append(fed)
            started = fed.saw(True)
            if started is not None:
                fed.epochs += 1
                clock.ledger.epoch_started(started, fed.epochs > 1)
        asked.clear()
        return True

    def _replaced_by(self, watch: LoaderWatch) -> LoaderWatch | None:
        """The training loader of the same data that this one seems to have been built in place of."""
        others = [other for other in self.watches if other.feeds and other is not watch and other not in self.asked]
        return next((other for other in reversed(others) if other.same_data(watch)), None)

    def withdraw(self, watch: LoaderWatch) -> None:
        """It gave no batch after all."""
        if watch in self.asked:
            self.asked.remove(watch)

    @guarded("deaths")
    def note_death(self, error: BaseException) -> None:
        """An error came out of a loader, or ends the process: does it say that a worker died?"""
        if not (deaths.named(error) or deaths.cut_off(error)):
            return
        workers = {pid: number for watch in self.watches for pid, number in watch.workers.processes().items()}
        dead = set(deaths.named(error)) or {pid for pid in workers if deaths.ended(pid)}
        if self._dead.issuperset(dead):
            return
        living = [iterator for watch in self.watches for iterator in watch.living()]
        deaths.note(self.record, workers, living, error, sorted(dead - self._dead))
        self._dead |= dead
        self.record.values[self.record.series(WORKER_DEATHS.name)] = len(self._dead)

    # -- what is published -------------------------------------------------------------------------------------------

    @guarded("loader")
    def publish(self) -> None:
        """Write the readings of the loader that training steps come from."""
        for watch in self.watches:
            watch.workers.retire()
        self.main = self._choose()
        if self.main is None:
            return
        main = self.main
        main.varying = main.varying or self.clock.ledger.uneven()
        known = dict((*main.readings(), *main.size_readings()))
        for name, label in self._written - known.keys():
            self._write(name, label, _NAN)  # known of another loader, and not of this one
        for (name, label), value in known.items():
            self._write(name, label, value)
        self._written |= known.keys()
        self._write_counts(main)

    def _write(self, name: str, label: str, value: float) -> None:
        labels = {METRICS[name].labels[0]: label} if label else {}
        self.record.values[self.record.series(name, **labels)] = value

    def _choose(self) -> LoaderWatch | None:
        """The loader that most steps came from of late; before any step, the first that was given.

        Where steps take a batch of each of several, it is the one that is waited for.
        """
        feeding = [watch for watch in self.watches if watch.feeds]
        recent = [watch for watch in feeding if watch.fed > watch.fed_before]
        for watch in feeding:
            watch.fed_before = watch.fed
        if not recent:
            main = self.main if self.main in feeding else next(iter(feeding), None)
            return main or next((watch for watch in self.watches if watch.given), None)
        slowest = max(recent, key=lambda watch: watch.waited)
        stays = self.main in recent and self.main is not None and slowest.waited < 2 * self.main.waited
        return self.main if stays else slowest

    def _write_counts(self, main: LoaderWatch) -> None:
        values, series = self.record.values, self.record.series
        values[series(LOADERS_BUILT.name)] = main.built
        if self._fed:
            values[series(LOADER_SHARE.name)] = self._fed.count(main) / len(self._fed)
        if main.number:
            if main.living() or main.loader() is not None:  # else the loop has ended, and let go of all of them
                values[series(WORKERS_IDLE.name)] = self.idle_workers(monotonic_ns())
            deaths = series(WORKER_DEATHS.name)
            if values[deaths] != values[deaths]:
                values[deaths] = 0.0

    def idle_workers(self, now: int) -> int:
        """Living workers of iterators that another one of the same data set has replaced, or several of data like it.

        The latter where each of the loaders was used for one epoch: several that take turns are used again.
        """
        groups = [(watch, group) for watch in self.watches for group in watch.workers.groups if group.living()]
        idle = 0
        for watch, group in groups:
            newer = [its for its, other in groups if other.born > group.born and other.fetched > group.fetched]
            same = sum(its.same_data(watch) for its in newer)
            alike = sum(its.kind == watch.kind and its.epochs <= 1 for its in newer) if watch.epochs <= 1 else 0
            if max(same, alike) >= MANY_REPLACED or (same and now - group.fetched > IDLE_NANOSECONDS):
                idle += len(group.slots)
        return idle
