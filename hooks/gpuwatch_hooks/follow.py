"""Loaders that were not given: found as they are iterated, in this process, while a run lives.

Two places of torch are watched, both without a frame of ours in a traceback. Every iterator of a DataLoader is seen as
it is made: it sets an attribute once that is a descriptor meanwhile. And ``DataLoader.__iter__`` is a descriptor whose
call is composed of functions written in C: what comes before and after it is done, and torch's own function is called
in between as if from the loop itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpuwatch_hooks.disguise import can_subclass, original_class, set_class
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.loader import iterator_class, open_begin, open_end, timed_iterator
from gpuwatch_hooks.session import Session
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
        watch.learn(loader)  # where the loader that was given wraps this one
    watch.add_iterator(iterator)
    set_class(iterator, iterator_class(session, watch, kind, around is None))
