"""The directory of records, the room in it, and the records."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gpuwatch.config import KEPT_RECORDS
from gpuwatch.doctor.check import Check, failure, warning, well
from gpuwatch.follower import header
from gpuwatch.layout import RECORD_BYTES
from gpuwatch.reader import Snapshot, read_all
from gpuwatch.report.wording import counted, printable, said

DIRECTORY, SPACE, RECORDS = "directory", "free space", "records"
FEWEST_RECORDS = 2
"""Records that must fit: a run's, and the next one's."""

SILENT_SECONDS = 300.0
"""A living rank that says nothing for this long may hang."""

PRIVATE_TO_JOBS = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))
_SHARED_MODE = 0o3733


def directory_checks(directory: Path) -> Iterator[Check]:
    """Can trainings of this user write there, and is everybody else kept out of what they write?"""
    shown = printable(str(directory))
    try:
        status = directory.stat()
    except FileNotFoundError:
        yield _missing(directory)
        return
    except OSError as error:
        yield failure(DIRECTORY, f"{shown}: {error.strerror}", "set GPUWATCH_DIR to a directory of your own")
        return
    if not stat.S_ISDIR(status.st_mode):
        yield failure(DIRECTORY, f"{shown} is not a directory", "remove it, or set GPUWATCH_DIR to another")
        return
    mode = stat.S_IMODE(status.st_mode)
    found = f"{shown}, mode {mode:04o}, of user {status.st_uid}"
    if not os.access(directory, os.W_OK | os.X_OK):
        yield failure(
            DIRECTORY,
            f"{found}: this user cannot write there, and its runs go unwatched",
            f"set GPUWATCH_DIR to a directory of your own, or `chmod {_SHARED_MODE:o} {shown}` for all users",
        )
    elif mode & 0o022 and not mode & stat.S_ISVTX:
        yield failure(
            DIRECTORY,
            f"{found}: other users may remove and replace records",
            f"`chmod 0700 {shown}` for one user, `chmod {_SHARED_MODE:o} {shown}` for all",
        )
    elif mode & 0o002 and mode & 0o044:
        yield warning(
            DIRECTORY,
            f"{found}: every user may list the records of the others",
            f"`chmod {_SHARED_MODE:o} {shown}`, so that only the daemon lists it",
        )
    elif status.st_uid != os.geteuid() and not mode & 0o002 and os.geteuid():
        yield warning(DIRECTORY, f"{found}: it belongs to another user", "set GPUWATCH_DIR to a directory of your own")
    elif any(place == directory or place in directory.parents for place in PRIVATE_TO_JOBS):
        yield warning(
            DIRECTORY,
            f"{found}: batch systems give each job a private one, which a daemon outside does not see",
            "set GPUWATCH_DIR to a directory that all jobs of the node share, such as /run/gpuwatch",
        )
    else:
        yield well(DIRECTORY, found)


def _missing(directory: Path) -> Check:
    above = next((parent for parent in directory.absolute().parents if parent.exists()), Path("/"))
    shown = printable(str(directory))
    if os.access(above, os.W_OK | os.X_OK) and above.is_dir():
        return well(DIRECTORY, f"{shown} is not there yet; the first run makes it")
    return failure(
        DIRECTORY,
        f"{shown} is not there, and this user cannot make it in {printable(str(above))}",
        "set GPUWATCH_DIR to a directory of your own",
    )


def space_checks(directory: Path) -> Iterator[Check]:
    """Is there room for records? A run takes its record's size at its start; without it, it goes unwatched."""
    place = next((path for path in (directory, *directory.absolute().parents) if path.exists()), Path("/"))
    try:
        room = os.statvfs(place)
    except OSError as error:
        yield warning(SPACE, f"not known: {error.strerror}", f"see `df {printable(str(place))}`")
        return
    free = room.f_bavail * room.f_frsize
    files = room.f_favail if room.f_files else None  # some file systems have no count
    records = min(free // RECORD_BYTES, files if files is not None else free)
    found = f"{said(free, 'bytes')} and {'any number of' if files is None else files} files free"
    todo = f"make room in {printable(str(place))}, or set GPUWATCH_DIR to another place"
    if records < FEWEST_RECORDS:
        yield failure(SPACE, f"{found}: a record takes {said(RECORD_BYTES, 'bytes')}", todo)
    elif records < KEPT_RECORDS:
        yield warning(SPACE, f"{found}: room for {counted(records, 'record')}", todo)
    else:
        yield well(SPACE, found)


def record_checks(directory: Path) -> Iterator[Check]:
    """Can the records be read, and do those who should speak do so?"""
    try:
        snapshots, rejected = read_all(directory, header)
    except PermissionError:
        yield well(RECORDS, "only the daemon may list the directory, as it should be where users share it")
        return
    except OSError as error:
        yield failure(RECORDS, f"cannot be listed: {error.strerror}", "see the directory above")
        return
    living = [snapshot for snapshot in snapshots if snapshot.up]
    yield from _rejected(rejected)
    yield from _silent(living)
    ended = len(snapshots) - len(living)
    found = f"{counted(len(living), 'living rank')}, {counted(ended, 'ended record')}"
    if ended > 2 * KEPT_RECORDS:
        yield warning(
            RECORDS,
            f"{found}: each user's next run keeps the newest {KEPT_RECORDS}, unless it may not list the directory",
            "remove old ones, as the Slurm epilog in deploy/ does",
        )
    else:
        yield well(RECORDS, found)


def _rejected(rejected: Sequence[tuple[str, str]]) -> Iterator[Check]:
    denied = [name for name, reason in rejected if reason.endswith("Permission denied")]
    broken = [reason for _, reason in rejected if not reason.endswith("Permission denied")]
    if denied:
        yield warning(
            RECORDS,
            f"{counted(len(denied), 'record')} of other users cannot be read: {_few(denied)}",
            f"let the daemon own the directory, with mode {_SHARED_MODE:o}; a umask of 077 hides records from it too",
        )
    if broken:
        yield warning(
            RECORDS,
            f"{counted(len(broken), 'file')} rejected: {_few(broken)}",
            "remove them; where the version differs, upgrade the older of the two installations",
        )


def _silent(living: Iterable[Snapshot]) -> Iterator[Check]:
    silent = [snapshot for snapshot in living if snapshot.progress_age > SILENT_SECONDS]
    if silent:
        longest = max(snapshot.progress_age for snapshot in silent)
        names = [f"rank {snapshot.rank} of {snapshot.run}" for snapshot in silent]
        yield warning(
            RECORDS,
            f"no progress for up to {said(longest, 'seconds')}: {_few(names)}",
            "see whether it hangs: `gpuwatch explain run-hang`",
        )


def _few(texts: Sequence[str], most: int = 3) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return printable(", ".join(texts[:most])) + more
