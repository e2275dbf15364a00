"""What workers tell of themselves, and what becomes of a worker that fails or dies."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import gpuwatch
from gpuwatch.catalog import (
    LOADER_BATCH,
    LOADER_BATCH_CPU_SECONDS,
    LOADER_BATCH_SECONDS,
    LOADER_ITEM_SECONDS,
    LOADER_PART_SECONDS,
    LOADER_READY,
    WORKER_BLOCKED,
    WORKER_BUSY,
    WORKER_CPU,
    WORKER_CPU_WAIT,
    WORKER_DEATHS,
    WORKER_RESIDENT,
    WORKER_UNIQUE,
)
from gpuwatch.expr import series_key
from gpuwatch.reader import Snapshot, read_all
from gpuwatch_hooks.worker_area import WorkerArea, cpu_time
from gpuwatch_hooks.worker_side import _Reader, read
from tests.loops import perceptron
from tests.programs import Programs
from tests.serving import eventually

pytestmark = [
    pytest.mark.usefixtures("records"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

DIED = "data-worker-died"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure torch waits five seconds for each worker, with gpuwatch and without."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


SLEEP = 0.004


class Sleeping(Dataset[torch.Tensor]):
    """Each item waits for something."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SLEEP)
        return torch.ones(8)


class Busy(Sleeping):
    """Each item takes a core's time."""

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.thread_time() + SLEEP
        while time.thread_time() < until:
            pass
        return torch.ones(8)


class Late(IterableDataset[torch.Tensor]):
    """A stream that waits for each item."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(80):
            time.sleep(SLEEP)
            yield torch.ones(8)


def slow_collate(items: list[torch.Tensor]) -> torch.Tensor:
    """Waits for twice as long as an item does."""
    time.sleep(2 * SLEEP)
    return torch.stack(items)


def trained(loader: Any, step_seconds: float = 0.0, given: bool = True) -> Snapshot:
    """Train for an epoch and read what is known then."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gpuwatch.attach(model, loader if given else None)
    for inputs in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        time.sleep(step_seconds)
    assert watch._run is not None
    snapshot = watch._run.session.snapshot()
    watch.detach()
    return snapshot


def part(snapshot: Snapshot, name: str) -> float:
    return snapshot.values[series_key(LOADER_PART_SECONDS.name, {"part": name})]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_items_and_collation_are_told_apart(workers: int, given: bool) -> None:
    loader = DataLoader(Sleeping(), 4, num_workers=workers, collate_fn=slow_collate)
    snapshot = trained(loader, given=given)
    # Sleeps take longer on a busy machine, each of the four of them.
    assert part(snapshot, "items") >= 4 * SLEEP
    assert 2 * SLEEP <= part(snapshot, "collate") < part(snapshot, "items")
    assert snapshot.values[LOADER_ITEM_SECONDS.name] >= 1.5 * SLEEP
    assert snapshot.values[LOADER_BATCH.name] == 4
    quantile = {
        rank: snapshot.values[series_key(LOADER_BATCH_SECONDS.name, {"quantile": rank})] for rank in ("0.1", "0.9")
    }
    assert 6 * SLEEP <= quantile["0.1"] <= quantile["0.9"]


@pytest.mark.parametrize("make", [lambda: DataLoader(Late(), 4, num_workers=1), lambda: DataLoader(Late(), 4)])
def test_the_items_of_a_stream_are_timed(make: Callable[[], Any]) -> None:
    assert part(trained(make()), "items") >= 4 * SLEEP


def test_items_are_counted_where_no_batch_size_tells() -> None:
    sampler = [list(range(start, start + 5)) for start in range(0, 160, 5)]
    for workers in (0, 1):
        values = trained(DataLoader(Sleeping(), batch_sampler=sampler, num_workers=workers)).values
        assert values[LOADER_BATCH.name] == 5
        assert values[LOADER_ITEM_SECONDS.name] >= SLEEP


def test_workers_that_sleep_are_blocked_and_workers_that_compute_are_not() -> None:
    sleeping = trained(DataLoader(Sleeping(), 4, num_workers=2)).values
    computing = trained(DataLoader(Busy(), 4, num_workers=2)).values
    assert sleeping[WORKER_BUSY.name] > 0.6
    assert sleeping[WORKER_BLOCKED.name] + sleeping.get(WORKER_CPU_WAIT.name, 0.0) > 0.5
    assert sleeping[WORKER_BLOCKED.name] > computing[WORKER_BLOCKED.name] + 0.1
    assert sleeping[WORKER_CPU.name] < 0.4
    # What a busy machine takes from it is a wait for a core.
    assert computing[WORKER_CPU.name] + computing.get(WORKER_CPU_WAIT.name, 0.0) > 0.6
    assert computing[WORKER_BLOCKED.name] < 0.3
    assert computing[LOADER_BATCH_CPU_SECONDS.name] == pytest.approx(4 * SLEEP, rel=0.3)
    assert sleeping[WORKER_RESIDENT.name] > sleeping[WORKER_UNIQUE.name] > 1 << 20


def test_what_a_decoder_in_a_process_of_its_own_uses_is_cpu_time_of_its_worker() -> None:
    words = WorkerArea.create(1, shared=False).slot(0)
    reader = _Reader(words)
    read(reader, time.monotonic_ns())
    before = cpu_time(words)
    subprocess.run([sys.executable, "-S", "-c", "import time\nwhile time.process_time() < 0.2: pass"], check=True)
    read(reader, time.monotonic_ns())
    assert cpu_time(words) - before > 0.15e9


def test_starved_fetches_find_no_batch_and_fed_ones_do() -> None:
    starved = trained(DataLoader(Sleeping(), 4, num_workers=1))
    fed = trained(DataLoader(Sleeping(), 1, num_workers=2), step_seconds=0.015)
    assert starved.values[LOADER_READY.name] < 0.2 < 0.7 < fed.values[LOADER_READY.name]
    assert part(fed, "transfer") < 0.01


# -- exceptions ----------------------------------------------------------------------------------------------------


class Failing(Dataset[int]):
    """Fails in the way that was asked for."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if self.how == "item" and index == 5:
            raise KeyError(f"item {index}")
        return index


class FailingStream(IterableDataset[int]):
    """Fails as it is begun, or later."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __iter__(self) -> Iterator[int]:
        if self.how == "begin":
            raise OSError(2, "no such shard")
        return self._items()

    def _items(self) -> Iterator[int]:
        yield from range(5)
        raise ValueError("a broken record")


def failing_collate(items: list[int]) -> int:
    """Fails at the second batch."""
    return 1 // (3 - items[0])


def failing_init(worker: int) -> None:
    """Fails in the second worker."""
    1 // (1 - worker)


FAILURES: dict[str, Callable[[], DataLoader[Any]]] = {
    "an item": lambda: DataLoader(Failing("item"), 3, num_workers=2),
    "an item, one by one": lambda: DataLoader(Failing("item"), batch_size=None, num_workers=2),
    "the collation": lambda: DataLoader(Failing(""), 3, num_workers=2, collate_fn=failing_collate),
    "the first step of a worker": lambda: DataLoader(Failing(""), 3, num_workers=2, worker_init_fn=failing_init),
    "the start of a stream": lambda: DataLoader(FailingStream("begin"), 3, num_workers=2),
    "a stream": lambda: DataLoader(FailingStream(""), 3, num_workers=2),
    "an item on the training thread": lambda: DataLoader(Failing("item"), 3),
    "the collation on the training thread": lambda: DataLoader(Failing(""), 3, collate_fn=failing_collate),
    "the start of a stream on the training thread": lambda: DataLoader(FailingStream("begin"), 3),
}


def failure(loader: DataLoader[Any]) -> tuple[object, ...]:
    """How a loader fails: after how many batches, with which exception, through which functions."""
    count = 0
    try:
        for _ in loader:
            count += 1
    except Exception as error:  # noqa: BLE001 - whatever it is
        frames = traceback.extract_tb(error.__traceback__)
        ours = {frame.name for frame in frames if "gpuwatch_hooks" in frame.filename}
        assert ours <= {"__next__", "__iter__"}, "of the watched loader: outside of everything of torch's"
        names = [frame.name for frame in frames if "gpuwatch_hooks" not in frame.filename]
        return count, type(error), str(error), error.__cause__, error.__context__, names
    return (count,)


@pytest.mark.parametrize("name", FAILURES)
def test_an_exception_in_a_worker_comes_with_the_same_traceback(name: str) -> None:
    expected = failure(FAILURES[name]())
    assert len(expected) > 1
    model = nn.Linear(1, 1)
    with gpuwatch.attach(model) as watch:
        assert failure(FAILURES[name]()) == expected, "found by itself"
        loader = FAILURES[name]()
        gpuwatch.attach(model, loader)
        assert failure(loader) == expected, "given"
        assert watch._run is not None
        snapshot = watch._run.session.snapshot()
    assert not [seen for seen in snapshot.observations if seen.rule == DIED], "an exception is no death"
    assert not snapshot.values.get(WORKER_DEATHS.name)


# -- deaths --------------------------------------------------------------------------------------------------------


PROGRAM = """
import os, re, signal, time
import torch
from torch.utils.data import DataLoader, Dataset

if os.environ.get("WATCHED"):
    import gpuwatch
    gpuwatch.attach(torch.nn.Linear(1, 1))


class Dying(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 9:
            {how}
        return index


try:
    # Lists need no descriptor from the worker: else torch may find the connection reset, or say so, as it happens.
    for _ in DataLoader(Dying(), 1, num_workers=2, collate_fn=list):
        {loop}
except RuntimeError as error:
    print(re.sub(r"[0-9]+[)]", "PID)", str(error)), flush=True)
    {then}
"""

DEATHS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "raise", 9, "killed by SIGKILL"),
    "of a wrong address": ("os.kill(os.getpid(), signal.SIGSEGV)", "os._exit(1)", 11, "killed by SIGSEGV"),
    "by its own exit": ("os._exit(3)", "raise", 0, "ended itself with status 3"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_worker_that_dies_is_named_and_the_exception_is_the_same(name: str, programs: Programs) -> None:
    how, then, number, words = DEATHS[name]
    text = PROGRAM.format(how=how, then=then, loop="time.sleep(0.05)" if then == "raise" else "pass")
    plain, watched = programs.run(text), programs.run(text, WATCHED="1", GPUWATCH_QUIET="1")
    assert watched.status == plain.status == 1
    # Which of its two messages torch gives is a matter of where it was when the worker died.
    # It may come while the first one is handled, too: the handler of SIGCHLD raises it.
    form = r"DataLoader worker \(pid(\(s\))? [\w, ]+\) (is killed by|exited unexpectedly)"
    assert all(re.search(form, ended.out + ended.err) for ended in (plain, watched))
    snapshot = read_all(watched.records)[0][0]
    (seen,) = [seen for seen in snapshot.observations if seen.rule == DIED]
    assert seen.where == "worker 1" and seen.magnitude == number
    assert words in seen.evidence and "/dev/shm" in seen.evidence and re.search(r"pid \d+", seen.evidence)
    assert snapshot.values[WORKER_DEATHS.name] == 1


def test_a_death_is_told_where_torch_only_found_the_connection_gone() -> None:
    """As when the worker still wrote its core: torch took it for alive."""
    with gpuwatch.attach(nn.Linear(1, 1)) as watch:
        assert watch._run is not None
        before = signal.getsignal(signal.SIGCHLD)
        try:
            iterator = iter(DataLoader(TensorDataset(torch.arange(40)), 1, num_workers=1))
            next(iterator)
            before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch's handler speaks first
            (worker,) = iterator._workers  # type: ignore[attr-defined]
            gone = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            watch._run.session.loading.note_death(gone)
            assert not watch._run.session.snapshot().values.get(WORKER_DEATHS.name), "of somebody else"
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            watch._run.session.loading.note_death(gone)
            snapshot = watch._run.session.snapshot()
            with pytest.raises(RuntimeError, match="exited unexpectedly"):
                list(iterator)
            assert worker.exitcode == -signal.SIGKILL, "its status was left for torch"
        finally:
            signal.signal(signal.SIGCHLD, before)
        assert watch._run.session.snapshot().values[WORKER_DEATHS.name] == 1, "told once"
    (seen,) = [seen for seen in snapshot.observations if seen.rule == DIED]
    assert seen.where == "worker 0" and seen.magnitude == 9 and "killed by SIGKILL" in seen.evidence


def test_workers_that_end_with_the_epoch_are_no_deaths() -> None:
    with gpuwatch.attach(nn.Linear(1, 1)) as watch:
        for _ in range(2):
            assert len(list(DataLoader(Failing(""), 3, num_workers=2))) == 4
        with pytest.raises(RuntimeError, match="the user's"):
            for _ in DataLoader(Failing(""), 3, num_workers=2):
                raise RuntimeError("the user's own, on (pid 1)")
        assert watch._run is not None
        assert not watch._run.session.snapshot().observations


def test_the_memory_of_workers_is_given_back(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("zero (deleted)") + len(os.listdir("/proc/self/fd"))

    loader = DataLoader(Failing(""), 3, num_workers=2)
    with gpuwatch.attach(nn.Linear(1, 1), loader):
        list(loader)
        before = mapped()
        for _ in range(4):
            list(loader)
        eventually(lambda: mapped() <= before + 1)  # the threads of torch's queues end when they come to it
