"""The watched loader: how long the training thread waits in it.

The loader keeps its identity: its class becomes a subclass of the same name with a timed ``__iter__``, so that the
user's variable, ``isinstance``, ``len`` and every attribute stay as they were, and only this one object is touched.
Iterators of torch's loaders are treated the same way; others (generators) are wrapped. A copy or a pickle of either is
of the original class.
"""

from __future__ import annotations

import abc
import copy
import functools
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpuwatch.catalog import LOADER_BATCH, LOADER_ITEM_SECONDS, LOADER_PERSISTENT, LOADER_WORKERS, WORKER_CPU_WAIT
from gpuwatch.layout import Phase, Word
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.model import elements_of
from gpuwatch_hooks.pace import BEGIN, END, SHIFT
from gpuwatch_hooks.session import Session

_MARK = "_gpuwatch_original"
_CLASS: Any = vars(object)["__class__"]
MOST_WORKERS = 8
WORKER_NANOSECONDS = 100_000_000
"""Time since the workers' start below which a share of it says nothing."""
_PHASE, _DATA, _OTHER = int(Word.PHASE), int(Phase.DATA), int(Phase.OTHER)


class LoaderWatch:
    """What is known of one watched loader."""

    def __init__(self, session: Session, loader: object) -> None:
        self.session = session
        self.loader = weakref.ref(loader)
        self.first = True
        self.epochs = 0
        self.opening = 0  # nanoseconds spent in __iter__, part of the first wait
        self.item_seconds: deque[float] = deque(maxlen=64)
        self.iterator_classes: dict[type, type] = {}
        self.elements: float | None = None
        self.iterator: weakref.ref[Iterator[object]] | None = None
        self.iterator_since = 0
        self.varying = False  # batches differ in size: each step's is noted
        self.workers = _whole(getattr(loader, "num_workers", None))
        self.batch_size = _whole(getattr(loader, "batch_size", None))
        persistent = getattr(loader, "persistent_workers", None)
        record = session.record
        if self.workers is not None:
            record.values[record.series(LOADER_WORKERS.name)] = self.workers
        if self.batch_size is not None:
            record.values[record.series(LOADER_BATCH.name)] = self.batch_size
        if isinstance(persistent, bool):
            record.values[record.series(LOADER_PERSISTENT.name)] = persistent

    @guarded("loader")
    def publish(self) -> None:
        """The median cost of an item, known where the training thread loads it itself; the workers' wait for cores."""
        waited = worker_cpu_wait(self.iterator, monotonic_ns() - self.iterator_since) if self.workers else None
        if waited is not None:
            self.session.record.values[self.session.record.series(WORKER_CPU_WAIT.name)] = waited
        self.varying = self.varying or self.session.clock.ledger.uneven()
        if self.workers == 0 and len(self.item_seconds) >= 8:
            record = self.session.record
            record.values[record.series(LOADER_ITEM_SECONDS.name)] = statistics.median(self.item_seconds)


@guarded("loader")
def install(session: Session, loader: object) -> Callable[[], None] | None:
    """Watch a loader; the returned function puts its class back. None where that cannot be done."""
    kind = type(loader)
    if getattr(kind, _MARK, None) is not None or not _can_subclass(kind):
        return None
    try:
        watch = LoaderWatch(session, loader)
        _set_class(loader, _timed_loader_class(kind, watch))
    except TypeError:
        return None  # a builtin, or a layout that does not allow it: its waits stay unknown
    session.loaders.append(watch)
    know_data(session, loader)
    return functools.partial(restore, watch)


def restore(watch: LoaderWatch) -> None:
    """Give the loader its class back, and the iterator that is in use."""
    for living in (watch.loader(), watch.iterator and watch.iterator()):
        original = getattr(type(living), _MARK, None)
        if original is not None:
            _set_class(living, original)


def _set_class(item: object, kind: type) -> None:
    _CLASS.__set__(item, kind)  # neither a __setattr__ of the user's nor the property below has a part in this


@guarded("leaks")
def know_data(session: Session, loader: object) -> None:
    """Searches for leaks begin at the data set too: it may cache what it loads."""
    dataset = getattr(loader, "dataset", None)
    if dataset is not None and hasattr(type(dataset), "__weakref__"):
        session.leaks.datasets.append(weakref.ref(dataset))


@guarded("loader")
def open_begin(watch: LoaderWatch) -> None:
    """The loop asks for an iterator: an epoch begins."""
    watch.first = True
    session = watch.session
    session.pace.mask = 0
    session.open_look()  # of the training loop, or of an evaluation over a watched loader
    session.clock.replay(session.pace.notes)
    session.clock.open_begin()


@guarded("loader")
def open_end(watch: LoaderWatch) -> None:
    """The iterator is there; its first batch may be asked for much later."""
    watch.opening = watch.session.clock.open_end()


@guarded("loader")
def fetch_begin(watch: LoaderWatch) -> None:
    """The loop asks for a batch, during a look or for the first of an epoch."""
    clock = watch.session.clock
    clock.replay(watch.session.pace.notes)
    clock.fetch_begin(watch.first)


@guarded("loader")
def fetch_end(watch: LoaderWatch, batch: object, delivered: bool) -> None:
    """A batch came during a look, or the epoch (or the loader) ended."""
    clock = watch.session.clock
    clock.replay(watch.session.pace.notes)
    if not delivered:
        clock.fetch_end(False, float("nan"))
        watch.session.open_look()  # the epoch is over: an evaluation is likely
        return
    elements = elements_of(batch)
    watch.varying = watch.varying or watch.elements not in (None, elements)
    watch.elements = elements
    wait = clock.fetch_end(True, elements)
    if watch.first:
        watch.first = False
        watch.epochs += 1
        clock.ledger.epoch_started(wait + watch.opening, watch.epochs > 1)
    elif watch.workers == 0 and watch.batch_size:
        watch.item_seconds.append(wait / 1e9 / watch.batch_size)


@guarded("loader")
def whole_elements(batch: object) -> int:
    """Elements of a batch as a note has them: -1 when it has no tensor."""
    elements = elements_of(batch)
    return int(elements) if elements == elements else -1


def timed_next(watch: LoaderWatch, fetch: Callable[[Any], object]) -> Callable[[Any], object]:
    """A ``__next__`` around ``fetch`` that notes when it was asked and when it answered."""
    pace = watch.session.pace
    note = pace.note

    def __next__(self: Any) -> object:
        # Between looks this is all that happens, written out here and not behind the guard: three stores that cannot
        # fail, in code that runs cold at every step.
        if pace.looking or watch.first:
            fetch_begin(watch)
        else:
            pace.mask = 0
            pace.words[_PHASE] = _DATA
            note(monotonic_ns() << SHIFT | BEGIN)
        batch, delivered = None, False
        try:
            batch = fetch(self)
            delivered = True
            return batch
        finally:
            if delivered and not (pace.looking or watch.first):
                note(monotonic_ns() << SHIFT | END)
                note((whole_elements(batch) or -1) if watch.varying else -1)
                pace.words[_PHASE] = _OTHER
            else:
                fetch_end(watch, batch, delivered)

    return __next__


def _timed_loader_class(kind: type, watch: LoaderWatch) -> type:
    def __iter__(self: Any) -> Iterator[object]:
        open_begin(watch)
        try:
            iterator = kind.__iter__(self)  # type: ignore[attr-defined]
        finally:
            open_end(watch)
        timed = timed_iterator(watch, iterator)
        # Not `or`: the truth of an iterator is asked of its length, and a stream has none.
        return iterator if timed is None else timed

    return _same_but(kind, {"__iter__": __iter__})


@guarded("loader")
def timed_iterator(watch: LoaderWatch, iterator: Iterator[object]) -> Iterator[object]:
    """The iterator with its waits timed; the same object where torch made it."""
    kind = type(iterator)
    if not hasattr(kind, "__next__"):
        return iterator  # none: the user's mistake, and python's message about it
    if not issubclass(kind, _BaseDataLoaderIter) or not _can_subclass(kind):
        return TimedIterator(watch, iterator)
    if getattr(kind, _MARK, None) is None:  # persistent workers hand out the same iterator again
        timed = watch.iterator_classes.get(kind)
        if timed is None:
            timed = watch.iterator_classes[kind] = _timed_iterator_class(kind, watch)
        watch.iterator, watch.iterator_since = weakref.ref(iterator), monotonic_ns()
        _set_class(iterator, timed)
    return iterator


def _timed_iterator_class(kind: type, watch: LoaderWatch) -> type:
    return _same_but(kind, {"__next__": timed_next(watch, kind.__next__)})  # type: ignore[attr-defined]


class TimedIterator:
    """A wrapper for iterators that cannot be re-classed; everything but the fetch is the iterator's own."""

    __slots__ = ("__weakref__", "_iterator", "_next")
    _iterator: Iterator[object]
    _next: Callable[[Any], object]

    def __init__(self, watch: LoaderWatch, iterator: Iterator[object]) -> None:
        object.__setattr__(self, "_iterator", iterator)
        object.__setattr__(self, "_next", timed_next(watch, next))

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> object:
        return self._next(self._iterator)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._iterator)  # what isinstance asks

    def __getattr__(self, name: str) -> object:
        return getattr(self._iterator, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._iterator, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._iterator, name)

    def __repr__(self) -> str:
        return repr(self._iterator)

    def __bool__(self) -> bool:
        return bool(self._iterator)

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __copy__(self) -> object:
        return copy.copy(self._iterator)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._iterator.__reduce_ex__(protocol)


def worker_cpu_wait(iterator: weakref.ref[Iterator[object]] | None, lived: int) -> float | None:
    """Share of the workers' time (``lived`` nanoseconds each) spent ready but without a core; None when unknown.

    Of all their time and not of their running time: one that sleeps for most of it (a disk, a network) waits for a core
    at each awakening, and still is not slowed down by that.
    """
    living = None if iterator is None else iterator()
    waiting = workers = 0
    for worker in (getattr(living, "_workers", None) or ())[:MOST_WORKERS]:
        try:
            with open(f"/proc/{worker.pid}/schedstat", "rb") as file:
                waiting += int(file.read().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended, or this kernel keeps no such sums
        workers += 1
    return min(1.0, waiting / (workers * lived)) if workers and lived > WORKER_NANOSECONDS else None


def _same_but(kind: type, methods: dict[str, object]) -> type:
    """A subclass that passes for ``kind``: same name, same module, and copies of its objects are of ``kind``."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Without the detour the copy's class would be looked up by name and found to be another one.
        _set_class(self, kind)
        try:
            return kind.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        finally:
            _set_class(self, timed)

    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__slots__": (),
        "__class__": property(lambda self: kind),  # what pickle compares with the class to store
        "__reduce_ex__": __reduce_ex__,
        _MARK: kind,
        **methods,
    }
    timed = type(kind)(kind.__name__, (kind,), namespace)
    return timed


def _can_subclass(kind: type) -> bool:
    # A metaclass or an __init_subclass__ of the user's may register classes: a subclass would be seen.
    if type(kind) not in (type, abc.ABCMeta):
        return False
    return all(
        "__init_subclass__" not in vars(base) or base.__module__ in ("typing", "builtins") for base in kind.__mro__
    ) and hasattr(kind, "__iter__")


def _whole(number: object) -> int | None:
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None
