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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwatch import descriptors, heap, service
from gpuwatch.burials import Burials
from gpuwatch.config import DEFAULT_PORT
from gpuwatch.deathwatch import DeathWatch
from gpuwatch.httpserver import Application, Server
from gpuwatch.inventory import Inventory, troubles
from gpuwatch.layout import State
from gpuwatch.lifecycle import Census
from gpuwatch.neighbours import with_neighbours
from gpuwatch.nvml import Nvml
from gpuwatch.reader import Snapshot
from gpuwatch.sampler import Sampler
from gpuwatch.web import application

if TYPE_CHECKING:
    from ssl import SSLContext

    from gpuwatch.webconfig import WebConfig

DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"
WATCH_SECONDS = 1.0
WATCH_COST = 100
LONGEST_PAUSE_SECONDS = 10.0
"""The watch over the records rests this many times as long as it took, within these limits."""

TRIM_SECONDS = 20.0
"""Between two times that free memory is given back."""

_ENDING = (signal.SIGTERM, signal.SIGINT)


class UsageError(ValueError):
    """The daemon cannot serve as asked; the text is one line."""


@dataclass
class _Lock:
    """The lock on a directory: the open file that holds it."""

    directory: Path
    file: int

    def close(self) -> None:
        os.close(self.file)


def serve(
    listen: str,
    directory: Path,
    *,
    exit_when_idle: float | None = None,
    any_port: bool = False,
    web_config: Path | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, or until no rank has lived for ``exit_when_idle`` seconds. Main thread only.

    ``listen`` is HOST:PORT; port 0 is any free one, and ``any_port`` takes one when the port is busy. ``web_config``
    is a file with certificates and users (:mod:`gpuwatch.webconfig`). Returns the exit status: 0, or 2 after one line
    on standard error that says why it cannot serve.
    """
    try:
        with contextlib.ExitStack() as stack:
            host, port = _address(listen)
            guard = None if web_config is None else _guard(web_config)
            stack.enter_context(_signals_held_back())
            heap.share_one_arena()
            files = descriptors.allowed()
            lock = _Lock(directory, _hold(directory))
            stack.callback(lock.close)
            sampler = Sampler(with_neighbours(Nvml().read, directory))
            pages = application(directory, sampler, guard.allows if guard is not None and guard.users else None)
            tls = guard.context if guard is not None and guard.secure else None
            server = _listen(host, port, any_port, pages, tls, descriptors.for_connections(files))
            stack.callback(server.server_close)
            watch = _Watch(lock, server, DeathWatch(descriptors.for_processes(files)))
            sampler.start()
            stack.callback(sampler.stop)
            threading.Thread(target=server.serve_forever, name="gpuwatch-http", daemon=True).start()
            stack.callback(server.shutdown)
            trouble = _announce(lock, server)
            _say(f"serving {server.url} for {directory}")
            if trouble:
                _say(trouble)
            if not server.is_loopback() and (guard is None or not guard.asks):
                _say(f"warning: whoever reaches {host} can read what is served: --web-config FILE asks for a password")
            heap.give_back()
            watch.run(exit_when_idle)
            return 0
    except (UsageError, service.Served) as error:
        _say(str(error))
        return 2


def _guard(path: Path) -> WebConfig:
    from gpuwatch.webconfig import WebConfig, WebConfigError

    try:
        return WebConfig(path)
    except WebConfigError as error:
        raise UsageError(str(error)) from None


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


def _listen(
    host: str, port: int, any_port: bool, pages: Application, tls: Callable[[], SSLContext] | None, connections: int
) -> Server:
    try:
        return Server(host, port, pages, tls, connections)
    except UnicodeError:  # of a name that the resolver cannot even ask for
        raise UsageError(f"cannot listen on {host[:60]!r}: it is no name of a host; --listen names another") from None
    except OSError as error:
        if any_port and port:
            return _listen(host, 0, False, pages, tls, connections)
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; --listen names another") from None


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Keep the signals that end us for :func:`_watch` to take: a handler could run in the middle of anything."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # every thread started from now on inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _announce(lock: _Lock, server: Server) -> str:
    """Write down where it serves; returns what is wrong when that cannot be done: it serves all the same."""
    try:
        service.announce(lock.file, server.server_port, server.url)
    except OSError as error:  # a full disk
        return f"cannot write down in {lock.directory / service.FILE} where it serves: {error.strerror}"
    return ""


class _Watch:
    """Looks after the directory: post-mortems of the dead, the lock, the room that is left. Says a thing once."""

    def __init__(self, lock: _Lock, server: Server, deaths: DeathWatch) -> None:
        self._lock = lock
        self._server = server
        self._census = Census(lock.directory)
        self._deaths = deaths
        self._burials = Burials(lock.directory, self._deaths.of, _say)
        self._said: set[str] = set()

    def run(self, exit_when_idle: float | None) -> None:
        """Until a signal says to end, or until no rank has lived for long enough."""
        self._deaths.start()
        try:
            self._go_on(exit_when_idle)
        finally:
            self._deaths.stop()

    def _go_on(self, exit_when_idle: float | None) -> None:
        lived = trimmed = time.monotonic()
        while True:
            began = time.monotonic()
            if began - trimmed >= TRIM_SECONDS:
                trimmed = began
                heap.give_back()
            lives, dead = self._look()
            now = time.monotonic()
            if lives:
                lived = now
            if exit_when_idle is not None and now - lived >= exit_when_idle:
                _say(f"no rank has lived for {exit_when_idle:g} s: ending")
                return
            pause = min(max(WATCH_SECONDS, WATCH_COST * (now - began)), LONGEST_PAUSE_SECONDS)
            self._burials.hold(dead)
            if signal.sigtimedwait(_ENDING, pause) is not None:
                return

    def _look(self) -> tuple[bool, list[Snapshot]]:
        """Whether any rank lives; those that are gone without an end mark."""
        try:
            snapshots, inventory = self._census.take()
        except OSError:
            return False, []  # the metrics say so
        self._deaths.keep([snapshot.path for snapshot in snapshots if snapshot.up])
        self._look_after(inventory)
        dead = [snapshot for snapshot in snapshots if not snapshot.up]
        return len(dead) < len(snapshots), [snapshot for snapshot in dead if snapshot.state < State.CLEAN]

    def _look_after(self, inventory: Inventory) -> None:
        lines = set(troubles(inventory))
        kinds = {re.sub(r"[0-9.,]+ (?:.iB|B)?", "", line): line for line in lines}  # numbers change, the trouble stays
        for kind in kinds.keys() - self._said:
            _say(f"warning: {kinds[kind]}")
        self._said = {said for said in self._said if said.startswith("cannot ")} | set(kinds)
        if not service.holds(self._lock.file, self._lock.directory):
            self._hold_again()

    def _hold_again(self) -> None:
        """Take the lock of a directory that was removed and made anew, so that runs find this daemon again."""
        with contextlib.suppress(OSError, service.Served):
            file = service.hold(self._lock.directory)
            os.close(self._lock.file)
            self._lock.file = file
            _say(_announce(self._lock, self._server) or f"{self._lock.directory} was made anew: serving it")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a log on a full disk
        print(f"gpuwatch: {text}", file=sys.stderr, flush=True)
