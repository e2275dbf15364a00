"""How long the training thread spends in the sampler, for the indices of a batch and for the first ones of an epoch.

The sampler's iterator is put between two calls of ours by ``map``, which is written in C: no frame of ours is on the
stack while code of the user's runs, and an exception comes through the same frames as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

from gpuwatch_hooks.disguise import original_class

KEPT = 64
TORCH = "torch.utils.data.dataloader"
NAME = "_sampler_iter"
"""Where an iterator of torch's keeps that of its sampler."""

_NEVER = object()


class SamplerTimes:
    """The sampler of one loader."""

    def __init__(self) -> None:
        self.batches: deque[int] = deque(maxlen=KEPT)  # nanoseconds
        self.starts: deque[int] = deque(maxlen=KEPT)  # of all that an epoch's first batch needed
        self.spent = 0  # on the batch in work
        self._begun = 0
        self._timed: tuple[dict[str, Any], Any, Any] | None = None

    def take(self, other: SamplerTimes) -> None:
        """Go on with what was measured of a loader that came before."""
        self.batches = deque([*other.batches, *self.batches], maxlen=KEPT)
        self.starts = deque([*other.starts, *self.starts], maxlen=KEPT)

    def epoch(self, iterator: Any, indices: Iterator[Any]) -> Any:
        """The indices of an epoch that begins: what stands for them until its first batch is there."""
        self._timed = None
        self.spent = 0
        return self._between(vars(iterator), indices) if _is_torchs(iterator) else indices

    def begin(self, iterator: Any, own: dict[str, Any], first: bool) -> None:
        """A batch is asked for, during a look."""
        if self._timed is None or not first:  # else what was spent as the workers were started counts too
            self.spent = 0
        if self._timed is None and NAME in own and _is_torchs(iterator):
            own[NAME] = self._between(own, own[NAME])

    def _between(self, own: dict[str, Any], indices: Any) -> Any:
        timed = map(self._end, iter(self._begin, _NEVER), indices)
        self._timed = own, timed, indices
        return timed

    def _begin(self) -> None:
        self._begun = monotonic_ns()

    def _end(self, mark: None, index: Any) -> Any:
        self.spent += monotonic_ns() - self._begun
        return index

    def end(self, delivered: bool, first: bool) -> None:
        """It came, or the epoch was over."""
        if self._timed is not None:
            own, timed, indices = self._timed
            self._timed = None
            if own.get(NAME) is timed:
                own[NAME] = indices
            if delivered:
                (self.starts if first else self.batches).append(self.spent)


def _is_torchs(iterator: Any) -> bool:
    """Whether an iterator is torch's own: others may look at that of their sampler, as torchdata's do."""
    kind = type(iterator)
    return (original_class(kind) or kind).__module__ == TORCH
