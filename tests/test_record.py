"""The flight record, writing end: it survives its process, and nothing it does harms the one it records."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwatch.catalog import BATCHES, OBSERVATION
from gpuwatch.layout import (
    OBSERVATION_SLOTS,
    RECORD_BYTES,
    RING_ROWS,
    SUFFIX,
    VALUE_CAPACITY,
    Column,
    Phase,
    State,
    Word,
)
from gpuwatch.reader import read, read_all
from gpuwatch.record import RecordFull, RecordWriter
from tests.children import in_child
from tests.recorded import row

WHO = {"run": "train", "rank": 0}
NOBODY = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, {**WHO, "rank": 3, "script": "train.py"})
    writer.values[writer.series(BATCHES.name)] = 7
    writer.counter("gpuwatch_phase_seconds_total", phase="data")
    writer.words[Word.STEP], writer.words[Word.PHASE] = 42, Phase.BACKWARD
    writer.step_row(*row(42, 1.5))
    writer.observe("debug-anomaly", "train.py:3", "on", 55.0)
    seen = read(writer.path)
    assert (seen.run, seen.rank, seen.identity["script"]) == ("train", 3, "train.py")
    assert (seen.step, seen.phase, seen.state, seen.up) == (42, Phase.BACKWARD, State.RUNNING, False)
    assert seen.values == {BATCHES.name: 7, 'gpuwatch_phase_seconds_total{phase="data"}': 0}
    assert seen.ring[0][Column.END] == 1.5
    (observed,) = seen.observations
    assert (observed.rule, observed.where, observed.magnitude, observed.step) == ("debug-anomaly", "train.py:3", 55, 42)
    assert seen.pid == os.getpid() and seen.uid == os.getuid()
    assert abs(seen.created - time.time()) < 60
    assert writer.snapshot().values == seen.values


def test_a_series_that_was_never_stored_is_absent(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, WHO)
    index = writer.series(BATCHES.name)
    assert math.isnan(writer.values[index])
    assert read(writer.path).values == {}
    assert writer.series(BATCHES.name) == index, "the same one again"


def test_a_file_is_private_and_of_one_size(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "deep" / "records", WHO)
    status = writer.path.stat()
    assert status.st_size == RECORD_BYTES and status.st_mode & 0o777 == 0o640 & ~_umask()
    assert writer.path.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in writer.path.parent.iterdir()] == [writer.path.name]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b c\n", "模型" * 100, "x" * 500, "", "..."])
def test_any_name_of_a_run_makes_a_file_in_the_directory(tmp_path: Path, name: str) -> None:
    writer = RecordWriter(tmp_path, {**WHO, "run": name})
    assert writer.path.parent == tmp_path and writer.path.is_file() and not writer.path.name.startswith(".")
    assert read(writer.path).run == name


def test_records_of_one_name_are_told_apart(tmp_path: Path) -> None:
    writers = [RecordWriter(tmp_path, WHO) for _ in range(20)]
    for number, writer in enumerate(writers):
        writer.words[Word.STEP] = number
    assert len({writer.path for writer in writers}) == 20
    snapshots, rejected = read_all(tmp_path)
    assert rejected == []
    assert [snapshot.step for snapshot in snapshots] == list(range(20)), "oldest first"


def test_series_beyond_the_capacity_are_refused_and_the_rest_stay(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, WHO)
    for number in range(VALUE_CAPACITY):
        writer.counter("n", i=str(number))
    with pytest.raises(RecordFull, match=f"a record holds {VALUE_CAPACITY} series"):
        writer.series("one_too_many")
    assert len(read(writer.path).values) == VALUE_CAPACITY


def test_names_beyond_the_schema_are_refused_and_the_rest_stay(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, WHO)
    with pytest.raises(RecordFull, match="the schema holds"):
        for number in itertools.count():
            writer.counter("n" * 500, i=str(number))
    writer.counter(BATCHES.name)
    assert BATCHES.name in read(writer.path).values


def test_observations_beyond_the_slots_are_refused_and_the_rest_can_be_said_again(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, WHO)
    for number in range(OBSERVATION_SLOTS):
        writer.observe("rule", f"place {number}", "", number)
    with pytest.raises(RecordFull, match=f"a record holds {OBSERVATION_SLOTS} observations"):
        writer.observe("rule", "one more place", "", 1)
    writer.observe("rule", "place 5", "worse", 500)
    observed = read(writer.path).observations
    assert len(observed) == OBSERVATION_SLOTS
    assert [seen.magnitude for seen in observed if seen.where == "place 5"] == [500]


@pytest.mark.parametrize("letter", ["x", "é", "\n", '"', "🔥", "\x00"])
def test_long_evidence_is_cut_and_the_place_kept(tmp_path: Path, letter: str) -> None:
    writer = RecordWriter(tmp_path, WHO)
    writer.observe("rule", "train.py:3", letter * 5000, 1)
    writer.observe("rule", "p" * 5000, letter * 5000, 2)
    first, second = read(writer.path).observations
    assert first.where == "train.py:3" and letter in first.evidence and first.evidence.endswith("…")
    assert second.where.startswith("ppp")


def test_the_ring_keeps_the_last_steps_in_order(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, WHO)
    for number in range(RING_ROWS + 500):
        writer.step_row(*row(number, number))
    numbers = [int(cells[Column.NUMBER]) for cells in read(writer.path).ring]
    # The oldest may be the one that is being overwritten.
    assert numbers == list(range(501, RING_ROWS + 500))
    assert [cells[Column.NUMBER] for cells in writer.recent_rows(3)] == [RING_ROWS + 497 + at for at in range(3)]
    assert len(writer.recent_rows(10 * RING_ROWS)) == RING_ROWS


# -- the lease ---------------------------------------------------------------------------------------------------------

WRITER = """
import os, sys, time
from pathlib import Path
from gpuwatch.layout import State, Word
from gpuwatch.record import RecordWriter

writer = RecordWriter(Path(sys.argv[1]), {"run": "train", "rank": 0})
if os.fork() == 0:
    os.close(1)
    time.sleep(60)  # a child that outlives its parent, as the workers of a loader do
    os._exit(0)
for step in range(1, 1_000_000):
    writer.words[Word.STEP] = step
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
    if step == 1000 and sys.argv[2:] == ["close"]:
        writer.close(State.CLEAN)
        time.sleep(60)
"""


@contextlib.contextmanager
def writing(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A process that writes steps, with a forked child, in a group of its own."""
    command = [sys.executable, "-c", WRITER, str(directory), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for(what: Callable[[], bool], seconds: float) -> float:
    """Wait until it is so; returns how long that took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, "not in time"
        time.sleep(0.005)
    return time.monotonic() - began


def test_a_killed_writer_is_dead_at_once_though_its_child_lives(tmp_path: Path) -> None:
    with writing(tmp_path) as process:
        assert process.stdout is not None
        last_said = 0
        while last_said < 5000:
            last_said = int(process.stdout.readline())
        (path,) = tmp_path.glob(f"*{SUFFIX}")
        assert read(path).up
        process.kill()
        assert wait_for(lambda: not read(path).up, 5.0) < 5.0
        os.killpg(process.pid, 0)  # its child is still there
        for line in process.stdout:  # none, if it was killed before it said another
            last_said = int(line)
        seen = read(path)
        assert seen.step - last_said in (0, 1), "the very last step"
        assert (seen.state, seen.ended) == (State.RUNNING, None), "no end mark: it was killed"


def test_a_stopped_writer_is_still_alive(tmp_path: Path) -> None:
    with writing(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (path,) = tmp_path.glob(f"*{SUFFIX}")
        process.send_signal(signal.SIGSTOP)
        assert read(path).up
        process.send_signal(signal.SIGCONT)


def test_closing_gives_up_the_lease_of_a_process_that_lives_on(tmp_path: Path) -> None:
    with writing(tmp_path, "close") as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 1000:
            pass
        (path,) = tmp_path.glob(f"*{SUFFIX}")
        wait_for(lambda: not read(path).up, 30.0)
        seen = read(path)
        assert process.poll() is None
        assert seen.state is State.CLEAN and seen.step == 1000
        assert seen.ended is not None and abs(seen.ended - time.time()) < 60


def test_late_stores_go_nowhere(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, WHO)
    index = writer.counter(BATCHES.name)
    words, values = writer.words, writer.values
    words[Word.STEP], values[index] = 10, 20
    writer.close(State.EXCEPTION)
    before = writer.path.read_bytes()
    writer.words[Word.STEP] = 11
    writer.values[index] = 21
    writer.step_row(*row(11, 1.0))
    writer.observe("rule", "", "", 1)
    writer.series(OBSERVATION.name)
    writer.close(State.CLEAN)
    assert writer.path.read_bytes() == before
    assert writer.snapshot().step == 11, "to the writer they look stored"
    assert read(writer.path).state is State.EXCEPTION


def test_a_forked_child_cannot_change_its_parents_record(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, WHO)
    index = writer.counter(BATCHES.name)
    before = bytes(writer.buffer)  # not from the file: to close that would drop the lease

    def child() -> str:
        writer.after_fork_in_child()
        writer.words[Word.STEP] = 99
        writer.values[index] = 99
        writer.step_row(*row(99, 1.0))
        writer.observe("rule", "", "", 99)
        writer.close(State.EXCEPTION)
        return str(writer.snapshot().step)

    assert in_child(child) == "99"
    assert bytes(writer.buffer) == before
    assert in_child(lambda: read(writer.path).up) == "True", "and the lease is the parent's"


def test_a_fork_of_a_watched_process_cannot_change_its_record(records: Path) -> None:
    import torch

    import gpuwatch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        for _ in range(10):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    watch = gpuwatch.attach(model)
    train()
    (path,) = records.glob(f"*{SUFFIX}")
    assert in_child(train) == "None"
    assert in_child(lambda: (read(path).step, read(path).state, read(path).up)) == str((10, State.RUNNING, True))
    train()
    assert in_child(lambda: read(path).step) == "20"
    watch.detach()
