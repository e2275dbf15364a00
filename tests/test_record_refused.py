"""Where no record can be made, or not by everybody: full disks, limits, users that share a directory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch.layout import (
    RECORD_BYTES,
    Word,
)
from gpuwatch.reader import read, read_all
from gpuwatch.record import RecordWriter
from tests.children import in_child

WHO = {"run": "train", "rank": 0}
NOBODY = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system smaller than a record."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(small_disk: Path) -> None:
    assert RECORD_BYTES > 256 << 10
    with pytest.raises(OSError, match="No space left"):
        RecordWriter(small_disk, WHO)
    assert list(small_disk.iterdir()) == []


def test_a_limit_on_file_sizes_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def child() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (RECORD_BYTES // 2, RECORD_BYTES // 2))
        return RecordWriter(tmp_path, WHO)

    assert in_child(child) == "OSError: [Errno 27] File too large"
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "records"
    place.write_text("")
    with pytest.raises(OSError, match="File exists"):
        RecordWriter(place, WHO)


@as_root
def test_an_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    _open_to_all(tmp_path)
    place = tmp_path / "records"
    place.mkdir(mode=0o755)
    answer = in_child(lambda: RecordWriter(place, WHO), NOBODY)
    assert answer.startswith("PermissionError: [Errno 13] Permission denied")
    assert list(place.iterdir()) == []


# The interpreter may live where only root can read: everything is imported before.
AS_NOBODY = (
    "import os, torch, gpuwatch, gpuwatch.advisor, gpuwatch_hooks.attach\n"
    f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
)


def _open_to_all(path: Path) -> None:
    for part in (path, *path.parents):
        if part.stat().st_uid == os.getuid() and "pytest" in str(part):
            part.chmod(0o755)


@as_root
def test_attach_warns_once_where_no_record_can_be_and_training_goes_on(tmp_path: Path) -> None:
    _open_to_all(tmp_path)
    place = tmp_path / "records"
    place.mkdir(mode=0o755)
    script = (
        f"{AS_NOBODY}"
        "model = torch.nn.Linear(2, 2)\n"
        "watch = gpuwatch.attach(model)\n"
        "again = gpuwatch.attach(model)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "print(watch.run, watch.findings(), model.weight.grad is not None)\n"
    )
    environment = {**os.environ, "GPUWATCH_DIR": str(place), "GPUWATCH_DAEMON": "0", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "None [] True\n", done.stderr
    assert done.returncode == 0
    assert "no flight record in" in done.stderr and "Traceback" not in done.stderr


@as_root
def test_two_users_share_a_directory_that_neither_may_list(tmp_path: Path) -> None:
    _open_to_all(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o3733)

    def write() -> str:
        writer = RecordWriter(shared, {**WHO, "run": f"of-{os.getuid()}"})
        writer.words[Word.STEP] = os.getuid()
        return writer.path.name

    names = {uid: in_child(write, uid) for uid in (NOBODY, 12345)}
    snapshots, rejected = read_all(shared)
    assert rejected == []
    assert {(seen.uid, seen.step, seen.run) for seen in snapshots} == {
        (uid, uid, f"of-{uid}") for uid in (NOBODY, 12345)
    }
    refused = in_child(lambda: os.unlink(shared / names[NOBODY]), 12345)
    assert refused.startswith("PermissionError"), "the sticky bit keeps what is another's"
    assert in_child(lambda: read(shared / names[NOBODY]).step, 12345).startswith("PermissionError")
    assert in_child(lambda: read_all(shared), 12345).startswith("PermissionError")
    assert {path.name for path in shared.iterdir()} == set(names.values())


@as_root
def test_attach_works_in_a_directory_that_may_not_be_listed(tmp_path: Path) -> None:
    _open_to_all(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o3733)
    script = f"{AS_NOBODY}print(gpuwatch.attach(torch.nn.Linear(2, 2), name='shared').run)\n"
    environment = {
        **os.environ,
        "GPUWATCH_DIR": str(shared),
        "GPUWATCH_DAEMON": "0",
        "GPUWATCH_QUIET": "1",
        "HOME": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "shared\n", "")
    assert len(list(shared.iterdir())) == 1
