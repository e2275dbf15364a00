"""A control group with little memory, where this machine lets the tests make one: programs run in it to their death."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuwatch.oomkill import oom_kills
from gpuwatch_hooks.cgroups import groups

_LIMITS = ("memory.limit_in_bytes", "memory.max")


@dataclass(frozen=True)
class MemoryGroup:
    """The directory of the group."""

    path: Path

    def join(self) -> None:
        """Put this process into it: for ``preexec_fn``."""
        with open(self.path / "cgroup.procs", "w") as file:
            file.write("0")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group within the tests' own, removed with the block; skips the test where none can be made."""
    path = _made(limit_bytes)
    try:
        yield MemoryGroup(path)
    finally:
        _until(lambda: _removed(path))


def _made(limit_bytes: int) -> Path:
    own = next((group for group in groups("memory") if oom_kills(group) is not None), None)
    if own is None:
        pytest.skip("no control group that counts out-of-memory kills")
    path = own / f"gpuwatch-test-{os.getpid()}-{time.monotonic_ns()}"
    with contextlib.suppress(OSError):
        path.mkdir()
        for name in _LIMITS:
            with contextlib.suppress(OSError):  # in version 2 a group with processes lends no controller to those in it
                if (path / name).exists():
                    (path / name).write_text(str(limit_bytes))
                    return path
        path.rmdir()
    pytest.skip(f"no control group can be made in {own}")


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return False  # a process of it is still on its way out
    return True


def _until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
