"""What timing adds to a batch in a loader worker.

In one process, the fastest of many short blocks with and without: what the machine does besides only adds.
"""

from __future__ import annotations

from time import monotonic_ns, perf_counter_ns
from typing import Any

from torch.utils.data._utils import fetch

BATCHES = 500


class _Items:
    """Items that cost nothing."""

    def __getitem__(self, index: int) -> int:
        return index


class _Queue:
    """Takes what it is given."""

    def put(self, item: object) -> None:
        """Nothing."""


def loading_lines(rounds: int) -> list[str]:
    """The cost of the stamps of a batch in a worker, for batches of one item."""
    from gpuwatch_hooks.disguise import same_but
    from gpuwatch_hooks.fetching import timed_fetcher
    from gpuwatch_hooks.worker_area import WorkerArea
    from gpuwatch_hooks.worker_side import stamps

    area = WorkerArea.create(1, False)
    begin, collate, end = stamps(area.slot(0), 1)
    data = _Items()
    kind = fetch._MapDatasetFetcher

    def put(self: Any) -> object:
        end()
        return _Queue.put.__get__(self)

    plain = kind(data, True, len, False), _Queue()
    timed = (
        timed_fetcher(kind, begin, collate, False, data)(data, True, len, False),
        same_but(_Queue, {"put": property(put)})(),
    )
    bare, watched = (min(_mean(*each) for _ in range(rounds)) for each in (plain, timed))
    reading = min(_clock() for _ in range(rounds))
    return [
        f"loader worker: +{(watched - bare) / 1000:.2f} us for a batch of one item that costs nothing, "
        f"{(watched - bare) / reading:.0f} readings of the clock   [fastest of {rounds} blocks of {BATCHES} batches]"
    ]


def _clock() -> float:
    begun = perf_counter_ns()
    for _ in range(BATCHES):
        monotonic_ns()
    return (perf_counter_ns() - begun) / BATCHES


def _mean(fetcher: Any, queue: Any) -> float:
    index = [0]
    begun = perf_counter_ns()
    for _ in range(BATCHES):
        queue.put(fetcher.fetch(index))
    return (perf_counter_ns() - begun) / BATCHES
