"""Rare work that needs the rulebook, done by a process of its own that ends with it: a page, a post-mortem.

Done in the daemon, what it loads and takes would stay there: 9 MB on every node, for a page that somebody opened once.
And a record that makes it fail takes nothing along.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gpuwatch.service import environment

SECONDS = 30.0
"""How long it may take; a page of eight ranks takes half a second."""

MOST_BYTES = 208 << 20
"""Address space that it may take: with the daemon it fits into the 256 MiB that a service or a container has."""

LONGEST_ANSWER = 1 << 24

_FIRST_TO_GO = 800
"""Its oom_score_adj: where memory runs out, the kernel ends it and not the daemon."""


class AsideError(RuntimeError):
    """It was not done; the text says why in one line."""


class NotStarted(AsideError):
    """There was no process to do it."""


def ask(module: str, arguments: Sequence[str], told: Iterable[Any]) -> bytes:
    """What a module prints, run as a program that reads these lines of JSON. Raises AsideError.

    The program begins with :func:`begin`. It is no fork, which would have the locks of all our threads as they were.
    """
    if not sys.executable:
        raise NotStarted("sys.executable is empty: there is no Python to start")
    try:
        here, there = socket.socketpair()
        with here, there:
            command = [sys.executable, "-m", module, *arguments]
            files = [(os.POSIX_SPAWN_DUP2, there.fileno(), number) for number in (0, 1)]
            child = os.posix_spawn(
                sys.executable, command, environment(), file_actions=files, setsid=True, setsigmask=()
            )
            there.close()
            return _answered(child, here, module, told)
    except OSError as error:
        raise NotStarted(f"cannot start {module}: {error.strerror}") from None


def begin() -> list[Any]:
    """For the program: limits itself, and gives what it is told."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(SECONDS))
    with contextlib.suppress(OSError, ValueError):  # not to be raised where the limit is lower
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(_FIRST_TO_GO))
    return list(map(json.loads, sys.stdin))


def _answered(child: int, connection: socket.socket, module: str, told: Iterable[Any]) -> bytes:
    """What the child says until it ends."""
    said = bytearray()
    deadline = time.monotonic() + SECONDS
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended: its status says how
            for line in told:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                connection.sendall(json.dumps(line).encode() + b"\n")
            connection.shutdown(socket.SHUT_WR)
            while len(said) <= LONGEST_ANSWER:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                more = connection.recv(1 << 16)
                if not more:
                    break
                said += more
            else:
                os.kill(child, signal.SIGKILL)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        raise AsideError(f"{module} took more than {SECONDS:g} s") from None
    finally:
        status = _waited(child)
    if status or not said:
        raise AsideError(f"{module} failed: {_ending(status)}")
    return bytes(said)


def _waited(child: int) -> int:
    try:
        return os.waitpid(child, 0)[1]
    except ChildProcessError:  # SIGCHLD is ignored: what it said must do
        return 0


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit status {code}"
