"""How workers come to be watched: as an iterator starts them, it reads its ``worker_init_fn``, and gets ours around it.

The iterator's class is a disguise (:mod:`gpuwatch_hooks.disguise`) in which that attribute is a property. What is
stored stays the user's own function; anyone else who reads it gets that.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.sampling import NAME
from gpuwatch_hooks.watchedloader import LoaderWatch
from gpuwatch_hooks.worker_area import WorkerArea
from gpuwatch_hooks.worker_side import WorkerInit
from gpuwatch_hooks.workers import WorkerGroup

_INIT, _PIN = "_worker_init_fn", "_pin_memory"


class _Again:
    """Stands for an attribute that an iterator sets as an epoch begins, also one that it is used again for.

    It has no ``__get__``: reads go past it, to what is stored.
    """

    def __init__(self, watch: LoaderWatch) -> None:
        self.watch = watch

    def __set__(self, iterator: Any, value: Any) -> None:
        timed = order(self.watch, iterator, value)
        iterator.__dict__[NAME] = value if timed is None else timed
        if not self.watch.given:
            self.watch.begin_epoch()


@guarded("parts")
def order(watch: LoaderWatch, iterator: Any, indices: Any) -> Any:
    """The indices of an epoch that begins; timed until its first batch is there."""
    return watch.parts.sampler.epoch(iterator, indices)


def own_starts(watch: LoaderWatch) -> dict[str, object]:
    """The attributes of an iterator of this watch that are properties."""

    def init(self: Any) -> object:
        own = self.__dict__.get(_INIT)
        if not starting(self.__dict__):
            return own
        ours = watched_init(watch, self, own)
        return own if ours is None else ours

    def keep_init(self: Any, value: object) -> None:
        self.__dict__[_INIT] = value

    methods: dict[str, object] = {_INIT: property(init, keep_init), NAME: _Again(watch)}
    if watch.pinning and not watch.number:
        methods[_PIN] = _pinning(watch)
    return methods


def _pinning(watch: LoaderWatch) -> property:
    """Looked up after a batch was made on the training thread, and before it is pinned."""

    def pin(self: Any) -> object:
        if watch.clocked:
            watch.parts.collated()
        return self.__dict__[_PIN]

    def keep_pin(self: Any, value: object) -> None:
        self.__dict__[_PIN] = value

    return property(pin, keep_pin)


def starting(own: dict[str, Any]) -> bool:
    """Whether an iterator with these attributes is about to start a worker."""
    return "_workers" in own and own.get("_worker_pids_set") is False and not own.get("_shutdown", True)


@guarded("workers")
def watched_init(watch: LoaderWatch, iterator: Any, own: object) -> WorkerInit | None:
    """The user's function (or none) with ours around it, and the memory that this iterator's workers report in."""
    group = watch.workers.group_of(iterator)
    if group is None:
        area = WorkerArea.create(iterator.__dict__["_num_workers"], not _forks(watch.context))
        group = WorkerGroup(iterator, area)
        watch.workers.add(group)
    return WorkerInit(own, group.area, watch.batch_size, os.getpid())


def _forks(context: Any) -> bool:
    return bool((multiprocessing if context is None else context).get_start_method() == "fork")
