"""Telling the items of a batch from its collation, without a frame of ours on the stack while either is made.

torch's fetchers look up ``auto_collation`` once before they load a batch's items and ``collate_fn`` once after them.
A subclass whose two attributes are properties reads the clock at these moments and gives back what is stored. An
exception of the user's data set comes through the same frames as ever, in a worker as well as on the training thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpuwatch_hooks.disguise import same_but, set_class

Stamp = Callable[[int], object]
"""Called at a moment of a batch, with the number of its items; 0 where that was not asked for."""


def timed_fetcher(
    kind: type, begin: Callable[[], object], collate: Stamp, counted: bool, dataset: object = None
) -> type:
    """A fetcher class that calls ``begin`` before the items and ``collate`` after them.

    ``counted`` tells whether the items have to be counted: where no batch size says how many there are. A fetcher made
    of this class for another data set than ``dataset`` (a loader within the data set) becomes an ordinary one at once.
    Where only fetchers that exist get this class, it need not be given: the class would keep the data set alive.
    """

    def begun(self: Any) -> object:
        begin()
        return self.__dict__["auto_collation"]

    def given(self: Any, value: object) -> None:
        self.__dict__["auto_collation"] = value
        if self.__dict__.get("dataset") is not dataset:
            set_class(self, kind)

    def loaded(self: Any) -> object:
        own = self.__dict__
        collate(_items(sys._getframe(1).f_locals) if counted and own["auto_collation"] else 0)
        return own["collate_fn"]

    def collation(self: Any, value: object) -> None:
        self.__dict__["collate_fn"] = value

    return same_but(kind, {"auto_collation": property(begun, given), "collate_fn": property(loaded, collation)})


def _items(local: dict[str, Any]) -> int:
    """How many items a fetcher was asked for, from its local variables."""
    index: Any = local.get("possibly_batched_index")
    return len(index) if hasattr(index, "__len__") else 0
