"""The watched loader: how long the training thread waits in it.

The loader keeps its identity: its class becomes a subclass of the same name with a timed ``__iter__``
(:mod:`gpuwatch_hooks.disguise`). Iterators of torch's loaders are treated the same way; others (generators) are
wrapped. Loaders that were not given are found by :mod:`gpuwatch_hooks.follow`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpuwatch.layout import Phase, Place, Word
from gpuwatch_hooks.backward import leave_no_frame
from gpuwatch_hooks.disguise import TimedIterator, can_subclass, original_class, same_but, set_class
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.model import elements_of
from gpuwatch_hooks.pace import BEGIN, END, SHIFT
from gpuwatch_hooks.session import Session, asked
from gpuwatch_hooks.settings import setting
from gpuwatch_hooks.watchedloader import LoaderWatch
from gpuwatch_hooks.workerstart import own_starts

_PHASE, _DATA, _OTHER = int(Word.PHASE), int(Phase.DATA), int(Phase.OTHER)
_PLACE, _ASKED, _CAME = int(Word.PLACE), int(Place.ASKED), int(Place.CAME)


@guarded("loader")
def install(session: Session, loader: object) -> Callable[[], None] | None:
    """Watch a loader; the returned function puts its class back. None where that cannot be done."""
    kind = type(loader)
    if original_class(kind) is not None or not hasattr(kind, "__iter__") or not can_subclass(kind):
        return None
    try:
        watch = next((known for known in session.loaders if known.loader() is loader), None)
        watch = watch or LoaderWatch(loader, given=True)
        set_class(loader, _timed_loader_class(kind, session, watch))
    except TypeError:
        return None  # a builtin, or a layout that does not allow it: its waits stay unknown
    watch.given = True
    if watch not in session.loaders:
        session.loaders.append(watch)
    know_data(session, loader)
    return functools.partial(restore, watch)


def restore(watch: LoaderWatch) -> None:
    """Give the loader its class back, and the iterators that are in use."""
    watch.restore()


@guarded("leaks")
def know_data(session: Session, loader: object) -> None:
    """Searches for leaks begin at the data set too: it may cache what it loads."""
    dataset = setting(loader, "dataset")
    if dataset is not None and hasattr(type(dataset), "__weakref__"):
        session.leaks.datasets.append(weakref.ref(dataset))


@guarded("loader")
def open_begin(session: Session, watch: LoaderWatch) -> bool:
    """The loop asks for an iterator: an epoch begins. True when that goes on the step clock."""
    watch.begin_epoch()
    watch.sourced = False
    loading = session.loading
    if not loading.admits(watch):
        return False
    session.pace.mask = 0
    session.open_look()  # of the training loader, or of an evaluation over a watched loader
    session.clock.replay(session.pace.notes)
    joins = loading.judge(watch)
    loading.withdraw(watch)  # no batch yet
    session.clock.open_begin(joins)
    loading.inside = watch
    return True


@guarded("loader")
def open_end(session: Session, watch: LoaderWatch) -> None:
    """The iterator is there; its first batch may be asked for much later."""
    if session.loading.inside is watch:
        session.loading.inside = None
        watch.opening = session.clock.open_end()


@guarded("loader")
def fetch_begin(session: Session, watch: LoaderWatch, iterator: object) -> None:
    """The loop asks for a batch, during a look or for the first of an epoch, or of a loader that is not noted."""
    loading, clock = session.loading, session.clock
    watch.clocked = False
    if not loading.admits(watch):
        return
    clock.replay(session.pace.notes)
    joins = loading.judge(watch)
    if not session.pace.looking and watch.apart and not watch.first:
        loading.withdraw(watch)
        return  # what it costs between looks is not training's wait
    if session.pace.looking and watch.feeds is not False:
        asked(session)
    watch.clocked = True
    loading.inside = watch
    clock.fetch_begin(watch.first, joins)
    fetched(watch, iterator)


@guarded("parts")
def fetched(watch: LoaderWatch, iterator: object) -> None:
    """A batch is asked for: its parts are timed."""
    source = watch.source(iterator)
    group = watch.workers.asked(source)
    watch.parts.begin(source, watch.batch_size, watch.number, group, watch.first)


@guarded("loader")
def fetch_end(session: Session, watch: LoaderWatch, batch: object, delivered: bool) -> None:
    """A batch came that was not simply noted, or the epoch (or the loader) ended."""
    loading, clock = session.loading, session.clock
    if loading.inside is not watch or not watch.clocked:
        if not delivered:
            died(session)
        return
    loading.inside = None
    clock.replay(session.pace.notes)
    first = watch.first
    if not delivered:
        clock.fetch_end(False, float("nan"))
        loading.withdraw(watch)
        arrived(session, watch, None, 0, False, first)
        session.open_look()  # the epoch is over: an evaluation is likely
        died(session)
        return
    elements = elements_of(batch)
    note_size(watch, elements)
    wait = clock.fetch_end(True, elements)
    arrived(session, watch, batch, wait, True, first)
    if first:
        watch.starting = wait + watch.opening
    else:
        watch.note_wait(wait)
    watch.settle()


@guarded("parts")
def arrived(session: Session, watch: LoaderWatch, batch: object, wait: int, delivered: bool, first: bool) -> None:
    """A batch came, or none: its parts are known."""
    watch.parts.end(wait, delivered, first)
    if delivered:
        watch.batches.look(batch, session.device.active)


@guarded("deaths")
def died(session: Session) -> None:
    """No batch came: did a worker die?"""
    error = sys.exc_info()[1]
    if isinstance(error, (RuntimeError, OSError, EOFError)):
        session.loading.note_death(error)


def note_size(watch: LoaderWatch, elements: float) -> None:
    """Do batches differ in size? The last one of an epoch may be smaller without that."""
    watch.differing = watch.differing or (watch.odd and not watch.first)
    watch.odd = watch.elements not in (None, elements)
    watch.varying = watch.varying or watch.odd
    if not watch.odd or watch.differing:
        watch.elements = elements


@guarded("loader")
def whole_elements(batch: object) -> int:
    """Elements of a batch as a note has them: -1 when it has no tensor."""
    elements = elements_of(batch)
    return int(elements) if elements == elements else -1


def timed_next(session: Session, watch: LoaderWatch, fetch: Callable[[Any], object]) -> Callable[[Any], object]:
    """A ``__next__`` around ``fetch`` that notes when it was asked and when it answered."""
    pace = session.pace
    note = pace.note

    def __next__(self: Any) -> object:
        # Between looks this is all that happens, written out here and not behind the guard: three stores that cannot
        # fail, in code that runs cold at every step.
        noted = not (pace.looking or watch.apart)
        placed = pace.several and watch.training
        if placed:
            pace.words[_PLACE] = pace.place | _ASKED
        if noted:
            pace.mask = 0
            pace.words[_PHASE] = _DATA
            note(monotonic_ns() << SHIFT | BEGIN)
        else:
            fetch_begin(session, watch, self)
        batch, delivered = None, False
        try:
            batch = fetch(self)
            delivered = True
            return batch
        finally:
            if placed:
                pace.words[_PLACE] = pace.place | _CAME
            if delivered and noted and not pace.looking:
                note(monotonic_ns() << SHIFT | END)
                note((whole_elements(batch) or -1) if watch.varying else -1)
                pace.words[_PHASE] = _OTHER
            elif noted:
                noted_end(session, watch, batch, delivered)
            else:
                fetch_end(session, watch, batch, delivered)
            if not delivered:
                leave_no_frame()

    return __next__


@guarded("loader")
def noted_end(session: Session, watch: LoaderWatch, batch: object, delivered: bool) -> None:
    """A fetch whose beginning was noted ended with the epoch, or within a look that was opened meanwhile."""
    watch.clocked = True
    session.loading.inside = watch
    fetch_end(session, watch, batch, delivered)


def _timed_loader_class(kind: type, session: Session, watch: LoaderWatch) -> type:
    def __iter__(self: Any) -> Iterator[object]:
        open_begin(session, watch)
        try:
            iterator = kind.__iter__(self)  # type: ignore[attr-defined]
        finally:
            open_end(session, watch)
        timed = timed_iterator(session, watch, iterator)
        # Not `or`: the truth of an iterator is asked of its length, and a stream has none.
        return iterator if timed is None else timed

    return same_but(kind, {"__iter__": __iter__})


@guarded("loader")
def timed_iterator(session: Session, watch: LoaderWatch, iterator: Iterator[object]) -> Iterator[object]:
    """The iterator with its waits timed; the same object where torch made it."""
    kind = type(iterator)
    if not hasattr(kind, "__next__"):
        return iterator  # none: the user's mistake, and python's message about it
    own = original_class(kind) or kind
    if not issubclass(own, _BaseDataLoaderIter) or not can_subclass(own):
        return TimedIterator(iterator, timed_next(session, watch, next))
    timed = iterator_class(session, watch, own, True)
    if kind is not timed:  # persistent workers hand out the same iterator again
        set_class(iterator, timed)
        if all(known() is not iterator for known in watch.iterators):
            watch.iterators.append(weakref.ref(iterator))
    return iterator


def iterator_class(session: Session, watch: LoaderWatch, kind: type, timed: bool) -> type:
    """The class of this watch's iterators of a kind; ``timed`` unless something around them is."""
    known = watch.iterator_classes.get((kind, timed))
    if known is None:
        methods = own_starts(watch)
        if timed:
            methods["__next__"] = timed_next(session, watch, kind.__next__)  # type: ignore[attr-defined]
        known = watch.iterator_classes[kind, timed] = same_but(kind, methods)
    return known
