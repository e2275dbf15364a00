"""What is written down of a rank whose process died without an end mark: one JSON file beside the records.

The daemon has it written by a process of its own (:mod:`gpuwatch.aside`).
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

from gpuwatch import aside
from gpuwatch.advisor import advise
from gpuwatch.death import KEY as death_key
from gpuwatch.death import Death
from gpuwatch.layout import POST_MORTEMS
from gpuwatch.lifecycle import exit_of, last_seen
from gpuwatch.oomkill import KEY
from gpuwatch.reader import RecordError, Snapshot, read
from gpuwatch.report.document import cause_of, memory_of

KEPT = 256
"""Post-mortems kept; older ones go, since a job that dies at every start would fill the disk."""


def document(snapshot: Snapshot, death: Death | None = None) -> dict[str, object]:
    """The post-mortem of a rank, as JSON."""
    return {
        "run": snapshot.run,
        "rank": snapshot.rank,
        "pid": snapshot.pid,
        "cause": exit_of(snapshot),
        "explanation": cause_of(snapshot),
        "started": snapshot.created,
        "last_seen": last_seen(snapshot),
        "last_step": snapshot.step,
        "last_phase": snapshot.phase.name.lower(),
        KEY: None if snapshot.oom_kill is None else snapshot.oom_kill.as_dict(),
        death_key: None if death is None else death.as_dict(),
        "memory": memory_of(snapshot),
        "findings": [finding.as_dict() for finding in advise(snapshot)],
    }


def write(directory: Path, snapshot: Snapshot, death: Death | None = None) -> Path | None:
    """Write a rank's post-mortem once; returns the new file, None when there is one already.

    Raises OSError when it cannot be written, or when the directory of post-mortems is somebody else's.
    """
    folder = directory / POST_MORTEMS
    folder.mkdir(mode=0o700, exist_ok=True)
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(place).st_uid != os.geteuid():
            raise PermissionError(0, "the directory belongs to another user", str(folder))
        name = f"{snapshot.path.stem}.json"
        if _exists(name, place):
            return None
        hidden = f".{name}.new"
        file = os.open(
            hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=place
        )
        try:
            with open(file, "w", encoding="utf-8") as text:
                json.dump(document(snapshot, death), text, indent=2)
                text.write("\n")
        except OSError:
            os.unlink(hidden, dir_fd=place)
            raise
        os.rename(hidden, name, src_dir_fd=place, dst_dir_fd=place)
        _remove_old(place)
        return folder / name
    finally:
        os.close(place)


def _exists(name: str, place: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _remove_old(place: int) -> None:
    names = [name for name in os.listdir(place) if name.endswith(".json")]
    if len(names) > KEPT:
        names.sort(key=lambda name: os.stat(name, dir_fd=place, follow_symlinks=False).st_mtime_ns)
        for name in names[:-KEPT]:
            os.unlink(name, dir_fd=place)


def _tell(directory: Path, record: Path, death: Death | None) -> dict[str, str]:
    """Write the post-mortem of a record; what there is to say of it, or why it cannot be written."""
    try:
        snapshot = read(record)
    except (OSError, RecordError):
        return {}  # removed or changed meanwhile
    try:
        written = write(directory, snapshot, death)
    except OSError as error:
        return {"failed": f"cannot write post-mortems into {directory}: {error.strerror}"}
    if written is None:
        return {}
    return {"said": f"rank {snapshot.rank} of {snapshot.run!a} died at step {snapshot.step}: {written}"}


if __name__ == "__main__":
    for path, seen in aside.begin():
        told = _tell(Path(sys.argv[1]), Path(path), None if seen is None else Death(**seen))
        print(json.dumps(told), flush=True)
