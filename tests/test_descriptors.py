"""Few files that may be open: everybody is served all the same."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from pathlib import Path

import pytest

from gpuwatch import descriptors
from gpuwatch.deathwatch import DeathWatch
from tests.recorded import write_run
from tests.serving import daemon, rank


def limited(soft: int, hard: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A process with these limits; what they are set to."""
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append(limits))
    return raised


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"),
    [
        (1024, 524288, 4096),
        (1024, 2048, 2048),
        (64, 64, 64),
        (8192, 8192, 8192),
        (1024, resource.RLIM_INFINITY, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be(
    soft: int, hard: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = limited(soft, hard, monkeypatch)
    assert descriptors.allowed() == allowed
    assert raised == ([(allowed, hard)] if 0 <= soft < allowed else [])


def test_silent_clients_and_few_files_keep_nobody_out(records: Path) -> None:
    write_run(records)
    script = 'ulimit -n 24; exec "$0" "$@"'  # both limits: it cannot be raised
    with daemon(records, wrapper=["sh", "-c", script]) as served, contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        assert served.scrape()['gpuwatch_source_up{source="records"}'] == 1
        assert served.get("/").status == 200


def test_no_more_processes_are_watched_than_there_may_be(tmp_path: Path) -> None:
    watch = DeathWatch(1)
    with rank(tmp_path, rank=0), rank(tmp_path, rank=1):
        before = len(os.listdir("/proc/self/fd"))
        watch.keep(list(tmp_path.glob("*.gpw")))
        assert len(os.listdir("/proc/self/fd")) == before + 1
    watch.stop()
