"""What a look at this machine says: one line, and what to do where it is not well."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"
STATES = (OK, WARN, FAIL)
"""From well to broken: with ``warn`` something is not known or will not last, with ``fail`` something does not work."""


@dataclass(frozen=True)
class Check:
    """``about`` is the subject, ``said`` what was found, ``todo`` what to do (nothing where all is well)."""

    about: str
    state: str
    said: str
    todo: str = ""


@dataclass(frozen=True)
class Machine:
    """Where the kernel shows what is looked at; tests point it elsewhere."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    devices: Path = Path("/dev")


def well(about: str, said: str) -> Check:
    """Nothing to do."""
    return Check(about, OK, said)


def warning(about: str, said: str, todo: str) -> Check:
    """Something is not known, or will not last."""
    return Check(about, WARN, said, todo)


def failure(about: str, said: str, todo: str) -> Check:
    """Something does not work."""
    return Check(about, FAIL, said, todo)


def content(path: Path) -> str | None:
    """The text of one of the kernel's files, None where it is not to be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None
