"""Which rank died first, and how: what the daemon sees of the ends of processes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch import deathwatch
from gpuwatch.advisor import advise_run
from gpuwatch.death import Death, death_of
from gpuwatch.deathwatch import DeathWatch
from gpuwatch.layout import POST_MORTEMS, State
from gpuwatch.reader import read, read_all
from tests.recorded import write_run
from tests.serving import daemon, eventually, rank

TELLS_STATUS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)


@pytest.fixture
def watch() -> Iterator[DeathWatch]:
    """A watch that waits."""
    watching = DeathWatch()
    watching.start()
    yield watching
    watching.stop()


def test_the_order_of_deaths_and_their_causes_are_seen(tmp_path: Path, watch: DeathWatch) -> None:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(rank(tmp_path, rank=number, world_size=2)) for number in (0, 1)]
        paths = {read(path).rank: path for path in tmp_path.glob("*.gpw")}
        watch.keep(paths.values())
        assert watch.of(paths[0]) is None
        processes[1].send_signal(signal.SIGKILL)
        processes[1].wait()
        eventually(lambda: watch.of(paths[1]))
        processes[0].send_signal(signal.SIGTERM)
        processes[0].wait()
        eventually(lambda: watch.of(paths[0]))
        first, second = watch.of(paths[1]), watch.of(paths[0])
        assert first is not None and second is not None and time.time() - 60 < first.at < second.at
        if TELLS_STATUS:
            eventually(lambda: (death := watch.of(paths[0])) is not None and death.words)
            assert [death.words for path in (paths[1], paths[0]) if (death := watch.of(path))] == [
                "it was ended by SIGKILL",
                "it was ended by SIGTERM",
            ]


def test_a_clock_that_goes_back_keeps_no_descriptor_of_the_dead(
    tmp_path: Path, watch: DeathWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deathwatch, "STATUS_SECONDS", 0.1)
    monkeypatch.setattr(deathwatch, "_status", lambda process: None)
    before = len(os.listdir("/proc/self/fd"))
    with rank(tmp_path) as process:
        (path,) = tmp_path.glob("*.gpw")
        watch.keep([path])
        process.kill()
        eventually(lambda: watch.of(path))
        monkeypatch.setattr("gpuwatch.deathwatch.time.time", lambda: 1000.0)
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_a_record_that_nobody_holds_is_not_waited_for(tmp_path: Path, watch: DeathWatch) -> None:
    path = write_run(tmp_path, state=State.CLEAN).path
    watch.keep([path, tmp_path / "gone.gpw"])
    assert watch._held == {}


def watched_by(pid: int) -> int:
    """How many processes this one holds a descriptor of."""
    count = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "pidfd" in os.readlink(file)
    return count


def test_the_daemon_writes_down_who_went_first_and_the_report_says_it(tmp_path: Path) -> None:
    directory = tmp_path / "records"
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(daemon(directory))
        processes = [stack.enter_context(rank(directory, rank=number, world_size=2)) for number in (0, 1)]
        eventually(lambda: watched_by(served.process.pid) == 2)
        written = directory / POST_MORTEMS
        for count, process in enumerate((processes[1], processes[0]), 1):
            process.kill()
            process.wait()
            eventually(lambda count=count: len(list(written.glob("*.json"))) == count)  # type: ignore[misc]
    found, _ = read_all(directory)
    assert all(snapshot.death is not None for snapshot in found)
    (said,) = [finding for finding, _ in advise_run(found) if finding.rule == "run-dead"]
    assert said.where.startswith("rank 1") and "2 of the run's ranks are gone" in said.evidence
    assert not TELLS_STATUS or "it was ended by SIGKILL" in said.evidence


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, ""),
        (signal.SIGSEGV.value, "it was ended by SIGSEGV"),
        (signal.SIGABRT.value | 0x80, "it was ended by SIGABRT"),
        (3 << 8, "it ended itself with exit status 3"),
        (40, "it was ended by signal 40"),
    ],
)
def test_a_status_is_said_in_words(status: int | None, words: str) -> None:
    assert Death(1.0, status).words == words


@pytest.mark.parametrize(
    "death", [None, 7, {}, {"at": "now"}, {"at": -1}, {"at": 1e300}, {"at": float("nan")}, [1]], ids=str
)
def test_nonsense_in_a_post_mortem_is_no_death(death: object, tmp_path: Path) -> None:
    record = write_run(tmp_path, state=None).path
    folder = tmp_path / POST_MORTEMS
    folder.mkdir()
    (folder / f"{record.stem}.json").write_text(json.dumps({"death": death}))
    assert death_of(record, os.getuid()) is None
    (folder / f"{record.stem}.json").write_text(json.dumps({"death": {"at": 5, "status": 1 << 40}}))
    assert death_of(record, os.getuid()) == Death(5.0)
