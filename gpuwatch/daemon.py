"""The node daemon: one process that serves every run of a directory of flight records, and the node's GPUs.

It keeps no state that matters: killed and started again, it serves the same. Nothing that a record holds, no driver
that is stuck and no client that is silent stops it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwatch import postmortem, service
from gpuwatch.config import DEFAULT_PORT
from gpuwatch.layout import State
from gpuwatch.lifecycle import Shelf
from gpuwatch.neighbours import with_neighbours
from gpuwatch.nvml import Nvml
from gpuwatch.reader import RecordError, read
from gpuwatch.sampler import Sampler
from gpuwatch.web import Server, application

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"
WATCH_SECONDS = 1.0
WATCH_COST = 100
LONGEST_PAUSE_SECONDS = 10.0
"""The watch over the records rests this many times as long as it took, within these limits."""

_ENDING = (signal.SIGTERM, signal.SIGINT)


class UsageError(ValueError):
    """The daemon cannot serve as asked; the text is one line."""


def serve(
    listen: str,
    directory: Path,
    *,
    exit_when_idle: float | None = None,
    any_port: bool = False,
) -> int:
    """Serve until SIGTERM or SIGINT, or until no rank has lived for ``exit_when_idle`` seconds. Main thread only.

    ``listen`` is HOST:PORT; port 0 is any free one, and ``any_port`` takes one when the port is busy. Returns the exit
    status: 0, or 2 after one line on standard error that says why it cannot serve.
    """
    try:
        with contextlib.ExitStack() as stack:
            host, port = _address(listen)
            stack.enter_context(_signals_held_back())
            lock = _hold(directory)
            stack.callback(os.close, lock)
            sampler = Sampler(with_neighbours(Nvml().read, directory))
            server = _listen(host, port, any_port, application(directory, sampler))
            stack.callback(server.server_close)
            sampler.start()
            stack.callback(sampler.stop)
            threading.Thread(target=server.serve_forever, name="gpuwatch-http", daemon=True).start()
            stack.callback(server.shutdown)
            service.announce(lock, server.server_port, server.url)
            _say(f"serving {server.url} for {directory}")
            _watch(directory, exit_when_idle)
            return 0
    except (UsageError, service.Served) as error:
        _say(str(error))
        return 2


def _address(listen: str) -> tuple[str, int]:
    host, _, number = listen.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", number) or int(number) > 65535:
        raise UsageError(f"cannot listen on {listen!r}: expected HOST:PORT, such as {DEFAULT_LISTEN}")
    return host.removeprefix("[").removesuffix("]"), int(number)


def _hold(directory: Path) -> int:
    try:
        if directory.exists() and not directory.is_dir():
            raise NotADirectoryError(0, "it is not a directory")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        next(directory.iterdir(), None)
        return service.hold(directory)
    except OSError as error:
        raise UsageError(f"cannot serve {directory}: {error.strerror}; --dir names another directory") from None


def _listen(host: str, port: int, any_port: bool, pages: WSGIApplication) -> Server:
    try:
        return Server(host, port, pages)
    except OSError as error:
        if any_port and port:
            return _listen(host, 0, False, pages)
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; --listen names another") from None


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Keep the signals that end us for :func:`_watch` to take: a handler could run in the middle of anything."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # every thread started from now on inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(directory: Path, exit_when_idle: float | None) -> None:
    """Write post-mortems until a signal says to end, or until no rank has lived for long enough."""
    shelf, buried = Shelf(directory), set[Path]()
    complaints: set[str] = set()
    lived = time.monotonic()
    while True:
        began = time.monotonic()
        try:
            snapshots, _ = shelf.look()
        except OSError:
            snapshots = []  # the metrics say so
        dead = [snapshot for snapshot in snapshots if not snapshot.up]
        for snapshot in dead:
            if snapshot.path not in buried and snapshot.state < State.CLEAN:
                _bury(directory, snapshot.path, complaints)
        buried = {snapshot.path for snapshot in dead}
        now = time.monotonic()
        if any(snapshot.up for snapshot in snapshots):
            lived = now
        if exit_when_idle is not None and now - lived >= exit_when_idle:
            _say(f"no rank has lived for {exit_when_idle:g} s: ending")
            return
        pause = min(max(WATCH_SECONDS, WATCH_COST * (now - began)), LONGEST_PAUSE_SECONDS)
        if signal.sigtimedwait(_ENDING, pause) is not None:
            return


def _bury(directory: Path, record: Path, complaints: set[str]) -> None:
    """Write the post-mortem of a rank that left no end mark. What goes wrong is said once."""
    try:
        snapshot = read(record)
    except (OSError, RecordError):
        return  # removed or changed meanwhile
    try:
        written = postmortem.write(directory, snapshot)
    except OSError as error:
        complaint = f"cannot write post-mortems into {directory}: {error.strerror}"
        if complaint not in complaints:
            complaints.add(complaint)
            _say(complaint)
        return
    if written is not None:
        _say(f"rank {snapshot.rank} of {snapshot.run!a} died at step {snapshot.step}: {written}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a log on a full disk
        print(f"gpuwatch: {text}", file=sys.stderr, flush=True)
