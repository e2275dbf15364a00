"""Promtool, run on files of a directory."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOM = 1 << 30
MEMORY = Path("/dev/shm")


def promtool(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """How it ended, and what it said.

    It collects garbage most of the time, and has little; it writes the series of each case to files, which wait for a
    disk where they are not in memory.
    """
    environment = {**os.environ, "GOGC": "400"}
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        environment["TMPDIR"] = str(MEMORY)
    return subprocess.run(["promtool", *arguments], cwd=directory, capture_output=True, text=True, env=environment)
