"""What watching a loader adds to a batch: on the training thread between looks, and in a worker.

The training thread takes blocks of batches from a bare, a floor and a watched iterator in turn; each watched block is
compared with the bare blocks on its two sides, and medians are taken. A worker's stamps are timed in one process: the
fastest of many short blocks with and without.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from time import monotonic_ns, perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import fetch

BATCHES = 500
TAKEN = 50
"""Batches of a block on the training thread; a worker has that many ready."""

CACHES = 8 << 20
"""Bytes that are written to where caches shall be cold."""

ITEMS = 1 << 22
"""More than are taken: no epoch ends."""


class _Items:
    """Items that cost nothing."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        return index


class _Queue:
    """Takes what it is given."""

    def put(self, item: object) -> None:
        """Nothing."""


def loading_lines(rounds: int) -> list[str]:
    """The cost of a batch on the training thread without and with a worker, and that of its stamps in the worker."""
    os.environ.update(GPUWATCH_DIR=tempfile.mkdtemp(), GPUWATCH_DAEMON="0", GPUWATCH_QUIET="1")
    torch.set_num_threads(1)
    return [*(training_line(rounds, workers) for workers in (0, 1)), worker_line(rounds)]


def training_line(rounds: int, workers: int) -> str:
    """What watching adds to a batch on the training thread between two looks, beside two readings of the clock."""
    import gpuwatch

    bare, floor = (iter(_loader(workers)) for _ in range(2))  # made before there is a run: nobody follows them
    floor.__class__ = _read_twice(type(floor))
    loader = _loader(workers)
    watch = gpuwatch.attach(nn.Linear(1, 1), loader)
    watched, session = _resting(watch, loader)
    scratch = torch.zeros(CACHES // 4)
    warm, cold, replayed = [], [], []
    for _ in range(rounds):
        warm.append([_block(each, workers, None) for each in (bare, floor, bare, watched, bare)])
        begun = perf_counter_ns()
        session.clock.replay(session.pace.notes)
        replayed.append((perf_counter_ns() - begun) / TAKEN)
        cold.append([_block(each, workers, scratch) for each in (bare, floor, bare, watched, bare)])
        session.clock.replay(session.pace.notes)
    watch.detach()
    name = f"{workers} worker(s), " + ("numbers that are ready" if workers else "tensors in memory")
    return (
        f"loader, {name}: a bare batch {_us([row[0] for row in warm])}; watched {_added(warm, 3)} on the training "
        f"thread, and {_us(replayed)} later, at a look; floor (the clock read twice) {_added(warm, 1)}; with cold "
        f"caches {_us([row[0] for row in cold])}, watched {_added(cold, 3)}, floor {_added(cold, 1)}   "
        f"[medians of {rounds} rounds of medians of {TAKEN} batches]"
    )


def _added(rows: list[list[float]], place: int) -> str:
    """What the blocks at this place of a row have more than the bare ones on both sides."""
    return "+" + _us([row[place] - (row[place - 1] + row[place + 1]) / 2 for row in rows])


def _us(nanoseconds: list[float]) -> str:
    return f"{statistics.median(nanoseconds) / 1000:.2f} us"


def _loader(workers: int) -> DataLoader[Any]:
    if workers:  # of numbers: a tensor's way through shared memory takes 0.5 ms, and differs more than what is asked
        return DataLoader(_Items(), batch_size=None, num_workers=workers, prefetch_factor=TAKEN)  # type: ignore[arg-type]
    return DataLoader(TensorDataset(torch.zeros(ITEMS, 1)), batch_size=1)


def _read_twice(kind: type) -> type:
    """The cheapest iterator that sees when it is asked and when it answers."""
    seen = [0, 0]

    def __next__(self: Any) -> object:
        seen[0] = monotonic_ns()
        batch = kind.__next__(self)  # type: ignore[attr-defined]
        seen[1] = monotonic_ns()
        return batch

    return type(kind.__name__, (kind,), {"__next__": __next__})


def _resting(watch: Any, loader: Any) -> tuple[Iterator[Any], Any]:
    """The loader's watched iterator as it is between two looks while steps come of its batches, and the session."""
    session = watch._run.session
    iterator = iter(loader)
    next(iterator)
    session.close_look()
    (known,) = session.loaders
    known.saw(True)
    return iterator, session


def _block(iterator: Iterator[Any], workers: int, scratch: torch.Tensor | None) -> float:
    """Nanoseconds to take a batch, the median of a block: others on the machine only make some of them longer.

    Before each batch ``scratch`` is written to: a step of training leaves nothing of ours in the caches either.
    """
    if workers:
        time.sleep(0.03)  # the worker works ahead
    times = []
    for _ in range(TAKEN):
        if scratch is not None:
            scratch += 1
        begun = perf_counter_ns()
        next(iterator)
        times.append(perf_counter_ns() - begun)
    return statistics.median(times)


def worker_line(rounds: int) -> str:
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
    return (
        f"loader worker: +{(watched - bare) / 1000:.2f} us for a batch of one item that costs nothing, "
        f"{(watched - bare) / reading:.0f} readings of the clock   [fastest of {rounds} blocks of {BATCHES} batches]"
    )


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
