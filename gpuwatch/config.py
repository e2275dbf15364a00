"""Where records live and which switches the environment sets. The only reader of ``GPUWATCH_*``."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from gpuwatch.interruption import expected

DIRECTORY = "GPUWATCH_DIR"
DISABLE = "GPUWATCH_DISABLE"
DAEMON = "GPUWATCH_DAEMON"
QUIET = "GPUWATCH_QUIET"
JOB_ID = "GPUWATCH_JOB_ID"
EXPERIMENT = "GPUWATCH_EXPERIMENT"

SERVICE_DIRECTORY = Path("/run/gpuwatch")
DEFAULT_PORT = 9847
"""Not in the list of ports that Prometheus exporters have claimed."""

KEPT_RECORDS = 64
"""Records of ended runs kept in a directory; attach removes older ones of the same user."""


def record_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's flight records are: the same answer for the writer, the daemon and the reports.

    ``GPUWATCH_DIR``, else ``/run/gpuwatch`` where a service made it for all users, else the user's runtime directory.
    Never ``/tmp`` or ``/dev/shm``: batch systems make those private to a job, so a daemon would not see them.
    """
    chosen = environ.get(DIRECTORY)
    if chosen:
        return _at_home(chosen)
    if _writable_directory(SERVICE_DIRECTORY):
        return SERVICE_DIRECTORY
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    if _writable_directory(runtime):
        return runtime / "gpuwatch"
    state = environ.get("XDG_STATE_HOME") or _at_home(environ.get("HOME", "~")) / ".local" / "state"
    return Path(state) / "gpuwatch"


def disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """``GPUWATCH_DISABLE=1``: attach does nothing at all."""
    return _on(environ.get(DISABLE))


def quiet(environ: Mapping[str, str] = os.environ) -> bool:
    """``GPUWATCH_QUIET=1``: no summary at the end of a run, no address at its start."""
    return _on(environ.get(QUIET))


def daemon_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether attach may start a daemon process: unless ``GPUWATCH_DAEMON=0``."""
    return environ.get(DAEMON, "1").strip().lower() not in ("0", "false", "no", "off")


def _on(value: str | None) -> bool:
    return (value or "").strip().lower() in ("1", "true", "yes", "on")


def _writable_directory(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except expected(OSError):
        return False
    return stat.S_ISDIR(mode) and os.access(path, os.W_OK | os.X_OK)


def _at_home(path: str) -> Path:
    """The path with ``~`` filled in; in the root directory for a user without a home."""
    try:
        return Path(path).expanduser()
    except expected(RuntimeError):
        return Path("/") / path.lstrip("~/")
