"""Loaders that were not given: found as they are iterated, in this process, while a run lives.

Two places of torch are watched, both without a frame of ours in a traceback. Every iterator of a DataLoader is seen as
it is made: it sets an attribute once that is a descriptor meanwhile. And ``DataLoader.__iter__`` is a descriptor whose
call is composed of functions written in C: what comes before and after it is done, and torch's own function is called
in between as if from the loop itself.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpuwatch_hooks.disguise import can_subclass, original_class, set_class
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.loader import iterator_class, know_data, open_begin, open_end, timed_iterator
from gpuwatch_hooks.session import Session
from gpuwatch_hooks.settings import setting
from gpuwatch_hooks.watchedloader import LoaderWatch

_SEED = "_base_seed"


class _Birth:
    """Stands for an attribute that an iterator sets once, as it is made. Reads go past it."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __set__(self, iterator: Any, value: object) -> None:
        iterator.__dict__[_SEED] = value
        if not self.session.ended:
            born(self.session, iterator, sys._getframe(1).f_locals.get("loader"))


class _Opening:
    """Stands for ``DataLoader.__iter__``."""

    def __init__(self, session: Session, original: Callable[[Any], Any]) -> None:
        self.session = session
        self.original = original

    def __get__(self, loader: Any, kind: type | None = None) -> Any:
        if loader is None or self.session.ended:
            return self.original if loader is None else MethodType(self.original, loader)
        return _BoundOpening(self, loader)


class _Called:
    """Looked up as a bound ``__iter__`` is called."""

    def __get__(self, bound: _BoundOpening | None, kind: type | None = None) -> Any:
        if bound is None:
            return self
        opening, loader = bound.opening, bound.loader
        watch = opened(opening.session, loader)
        if watch is None:
            return MethodType(opening.original, loader)

        def finish(iterator: Any) -> Any:
            finished(opening.session, watch, iterator)
            return iterator

        return functools.partial(next, map(finish, map(opening.original, (loader,))))


class _BoundOpening:
    """``loader.__iter__``."""

    __slots__ = ("loader", "opening")
    __call__ = _Called()

    def __init__(self, opening: _Opening, loader: Any) -> None:
        self.opening = opening
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(MethodType(self.opening.original, self.loader), name)


def install(session: Session) -> Callable[[], None]:
    """Follow every loader; the returned function stops it."""
    opening = _Opening(session, DataLoader.__iter__)
    birth = _Birth(session)
    DataLoader.__iter__ = opening  # type: ignore[assignment, method-assign]
    setattr(_BaseDataLoaderIter, _SEED, birth)

    def stop() -> None:
        if vars(DataLoader).get("__iter__") is opening:  # someone else's wrapper on top stays
            DataLoader.__iter__ = opening.original  # type: ignore[method-assign]
        if vars(_BaseDataLoaderIter).get(_SEED) is birth:
            delattr(_BaseDataLoaderIter, _SEED)
        for watch in session.loaders:
            watch.restore()

    return stop


@guarded("loader")
def adopt(session: Session, given: object) -> Callable[[], None] | None:
    """Watch the iterators of torch's that something that was given takes its batches from: an iterator is no loader.

    ``itertools.cycle(loader)``, ``zip``, ``enumerate`` and the like have asked for theirs already. Its workers run.
    """
    found = list(_sources(given))
    for iterator in found:
        own = vars(iterator)
        watch = LoaderWatch(iterator, given=True)
        watch.learn(SimpleNamespace(**{name: own.get(f"_{name}") for name in _SETTINGS}, **_sampling(own)))
        watch.add_iterator(iterator)
        set_class(iterator, iterator_class(session, watch, type(iterator), True))
        session.loaders.append(watch)
    return functools.partial(_let_go, session, found) if found else None


_SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")


def _sampling(own: dict[str, Any]) -> dict[str, Any]:
    sampler = own.get("_index_sampler")
    return {"batch_size": setting(sampler, "batch_size"), "batch_sampler": sampler}


def _sources(given: object, depth: int = 3) -> Iterator[Any]:
    kind = type(given)
    if issubclass(kind, _BaseDataLoaderIter):
        if original_class(kind) is None and can_subclass(kind):
            yield given
    elif depth and kind in _PASSING:
        for part in gc.get_referents(given):
            yield from _sources(part, depth - 1)


_PASSING = (itertools.cycle, itertools.islice, itertools.chain, zip, map, enumerate, tuple)


def _let_go(session: Session, iterators: list[Any]) -> None:
    for watch in session.loaders:
        if any(watch.loader() is iterator for iterator in iterators):
            watch.restore()
    iterators.clear()


@guarded("loader")
def opened(session: Session, loader: Any) -> LoaderWatch | None:
    """A loader's ``__iter__`` is called. None where it goes on within something that is watched already."""
    if session.loading.inside is not None:
        return None
    watch = session.loading.watch_of(loader)
    return watch if open_begin(session, watch) else None


@guarded("loader")
def finished(session: Session, watch: LoaderWatch, iterator: Any) -> None:
    """It has returned."""
    open_end(session, watch)
    if isinstance(iterator, _BaseDataLoaderIter) and can_subclass(original_class(type(iterator)) or type(iterator)):
        timed_iterator(session, watch, iterator)


@guarded("loader")
def born(session: Session, iterator: Any, loader: Any) -> None:
    """An iterator of a loader is being made; its workers are not started yet."""
    kind = type(iterator)
    if loader is None or original_class(kind) is not None or not can_subclass(kind):
        return
    loading = session.loading
    around = loading.inside
    if around is None:
        watch = loading.watch_of(loader)
        if not loading.admits(watch):
            return
        watch.begin_epoch()
        session.open_look()
    elif around.sourced:
        return  # a loader within the data set of another
    else:
        watch = around
        if watch.number is None:  # the loader that was given wraps this one
            know_data(session, loader)
        watch.learn(loader)
    watch.add_iterator(iterator)
    session.copies.survey(loader)
    set_class(iterator, iterator_class(session, watch, kind, around is None))
