"""Whether a daemon serves a directory, and starting one: what the training process needs to know of the daemon.

Only the standard library, since it loads in the training process. The daemon holds a lock on ``daemon.json`` in its
directory as long as it lives; the file says where it serves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuwatch.interruption import expected
from gpuwatch.recordparts import leased

FILE = "daemon.json"
LOG = "daemon.log"
IDLE_SECONDS = 600
"""A daemon that nobody asked for by name ends this long after the last run."""

LARGEST_LOG_BYTES = 64 << 10
_LARGEST_FILE_BYTES = 4096


class Served(RuntimeError):
    """Another daemon serves this directory already; the text says where."""


def running(directory: Path) -> str | None:
    """Address of the daemon that serves this directory, such as ``http://127.0.0.1:9847/``; None when there is none.

    Never raises for what it finds there. Not for use inside the daemon: closing the file would drop its lock.
    """
    try:
        file = os.open(directory / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except expected(OSError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode) or not leased(file):
            return None
        return _url(os.pread(file, _LARGEST_FILE_BYTES, 0))
    except expected(OSError):
        return None
    finally:
        os.close(file)


def hold(directory: Path) -> int:
    """Take the lock of the one daemon of this directory; returns the open file, to be kept open for life.

    Raises Served when another one has it and OSError when the file cannot be had.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(directory / FILE, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(0, "not a regular file", str(directory / FILE))
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        os.ftruncate(file, 0)  # the last daemon's address is no longer true
    except BlockingIOError:
        url = _url(os.pread(file, _LARGEST_FILE_BYTES, 0))
        os.close(file)
        raise Served(f"{directory} is served already" + (f" at {url}" if url else "")) from None
    except BaseException:
        os.close(file)
        raise
    return file


def holds(file: int, directory: Path) -> bool:
    """Whether the held file is still the one that others ask: the directory may have been removed and made anew."""
    try:
        here, there = os.fstat(file), os.stat(directory / FILE, follow_symlinks=False)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def announce(file: int, port: int, url: str) -> None:
    """Say in the held file where this process serves. Raises OSError, on a full disk for one."""
    os.pwrite(file, json.dumps({"pid": os.getpid(), "port": port, "url": url}).encode(), 0)


def start(directory: Path) -> None:
    """Start a daemon for this directory as a process of its own, that is no child of this one and outlives it.

    Returns at once. When several ranks do so together, one daemon stays and the others end by themselves. Raises
    OSError when no process can be started.
    """
    if not sys.executable:
        raise FileNotFoundError("sys.executable is empty: there is no Python to start a daemon with")
    directory = Path(os.path.abspath(directory))
    command = [os.path.abspath(sys.executable), "-m", "gpuwatch", "serve", "--dir", str(directory)]
    command += ["--exit-when-idle", str(IDLE_SECONDS), "--any-port"]
    # The shell leaves the daemon to init and ends: this process never has a child that stays. From the root directory,
    # since the daemon must neither pin this one nor find modules in it.
    script = ["sh", "-c", 'cd /; exec "$@" &', "sh", *command]
    try:
        shell = _spawn(script, directory / LOG)
    except expected(OSError):
        shell = _spawn(script, Path(os.devnull))
    with contextlib.suppress(ChildProcessError):  # reaped by somebody else, or SIGCHLD is ignored
        os.waitpid(shell, 0)


def _spawn(command: list[str], log: Path) -> int:
    # posix_spawn, not subprocess: no fork handlers, no pipe, no thread, nothing left to warn about.
    written = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        written |= os.O_TRUNC if log.stat().st_size > LARGEST_LOG_BYTES else 0
    except expected(OSError):
        pass  # none yet
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, str(log), written, 0o600),
        *((os.POSIX_SPAWN_CLOSE, file) for file in _inheritable()),
    ]
    return os.posix_spawn(
        "/bin/sh",
        command,
        environment(),
        file_actions=actions,
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE),
    )


def _inheritable() -> list[int]:
    """Open files beyond standard error that a child would get: held by a daemon, a pipe would never end."""
    files = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own file is closed by now
                if int(name) > 2 and os.get_inheritable(int(name)):
                    files.append(int(name))
    return files


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment, made fit for a daemon in another directory: it must find the same gpuwatch."""
    passed = {name: text for name, text in environ.items() if name not in ("PYTHONINSPECT", "PYTHONWARNINGS")}
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    home = Path(__file__).resolve().parent.parent
    if home.name not in ("site-packages", "dist-packages"):  # imported from a source tree
        paths.append(str(home))
    if paths:
        passed["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        passed.pop("PYTHONPATH", None)
    passed["PYTHONSAFEPATH"] = "1"  # where `-m` would look first: the directory it starts in
    return passed


def _url(content: bytes) -> str | None:
    try:
        url = json.loads(content)["url"]
    except (LookupError, RecursionError, TypeError, ValueError):
        return None
    return url if isinstance(url, str) and url.startswith(("http://", "https://")) and url.isprintable() else None
