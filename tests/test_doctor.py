"""``gpuwatch doctor``: the directory, the records and the command; each check both ways."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuwatch import doctor
from gpuwatch.cli import main
from gpuwatch.config import KEPT_RECORDS
from gpuwatch.doctor import records
from gpuwatch.doctor.check import Check
from gpuwatch.doctor.records import directory_checks, record_checks, space_checks
from gpuwatch.layout import RECORD_BYTES, State
from tests.children import in_child
from tests.doctoring import told
from tests.recorded import write_run
from tests.serving import environment, rank

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as several users")


# -- the directory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of records that is not below a place that batch systems make private."""
    monkeypatch.setattr(records, "PRIVATE_TO_JOBS", ())
    directory = tmp_path / "records"
    directory.mkdir(mode=0o700)
    return directory


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o700, "ok "),
        (0o3733, "ok "),
        (0o777, "fail .*other users may remove and replace records"),
        (0o733, "fail .*other users may remove"),
        (0o770, "fail .*other users may remove"),
        (0o1777, "warn .*every user may list"),
    ],
)
def test_the_mode_of_the_directory_keeps_others_out(place: Path, mode: int, said: str) -> None:
    place.chmod(mode)
    assert re.match(said, told(directory_checks(place)))


def test_a_directory_that_is_not_there_yet_is_well_where_it_can_be_made(place: Path) -> None:
    assert told(directory_checks(place / "a" / "b")).endswith("is not there yet; the first run makes it")


def test_something_else_in_its_place_is_said(place: Path) -> None:
    (place / "file").touch()
    assert "is not a directory" in told(directory_checks(place / "file"))
    assert told(directory_checks(place / "file" / "below")).startswith("fail ")


@pytest.mark.parametrize("name", ["/tmp", "/dev/shm"])
def test_a_place_that_batch_systems_make_private_is_a_warning(tmp_path: Path, name: str) -> None:
    directory = Path(name) / f"gpuwatch-test-{os.getpid()}"
    directory.mkdir(mode=0o700)
    try:
        assert re.match("warn .*a daemon outside does not see", told(directory_checks(directory)))
    finally:
        directory.rmdir()


@needs_root
def test_a_directory_that_the_user_cannot_write_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PRIVATE_TO_JOBS", ())
    directory = Path("/tmp") / f"gpuwatch-test-{os.getpid()}"
    directory.mkdir(mode=0o755)
    try:
        said = in_child(lambda: told(directory_checks(directory)), uid=12001)
        assert re.match("fail .*this user cannot write there", said)
        assert re.match(
            "fail .*cannot make it in", in_child(lambda: told(directory_checks(directory / "a")), uid=12001)
        )
        directory.chmod(0o3733)
        assert in_child(lambda: told(directory_checks(directory)), uid=12001).startswith("ok ")
    finally:
        directory.rmdir()


@pytest.mark.parametrize(
    ("free", "files", "state"),
    [
        (100 * RECORD_BYTES, 1000, "ok"),
        (100 * RECORD_BYTES, 1, "fail"),
        (100 * RECORD_BYTES, 10, "warn"),
        (RECORD_BYTES, 1000, "fail"),
        (10 * RECORD_BYTES, 1000, "warn"),
    ],
)
def test_room_for_records_is_counted_in_bytes_and_in_files(
    place: Path, monkeypatch: pytest.MonkeyPatch, free: int, files: int, state: str
) -> None:
    room = SimpleNamespace(f_bavail=free, f_frsize=1, f_favail=files, f_files=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    assert told(space_checks(place)).startswith(f"{state} ")


def test_a_file_system_without_a_count_of_files_has_room_for_any_number(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(f_bavail=1 << 30, f_frsize=1, f_favail=0, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    assert told(space_checks(place / "missing")) == "ok 1 GiB and any number of files free"


# -- the records ------------------------------------------------------------------------------------------------------


def test_records_that_can_be_read_are_counted(place: Path) -> None:
    write_run(place, "ended")
    with rank(place, name="living"):
        assert told(record_checks(place)) == "ok 1 living rank, 1 ended record"


def test_files_that_are_no_records_are_named(place: Path) -> None:
    (place / "bad.gpw").write_bytes(b"nothing")
    said = told(record_checks(place))
    assert said.startswith("warn 1 file rejected: bad.gpw has 7 bytes") and said.endswith(
        "ok 0 living ranks, 0 ended records"
    )


@needs_root
def test_records_of_others_that_cannot_be_read_are_a_matter_of_modes() -> None:
    directory = Path("/tmp") / f"gpuwatch-test-{os.getpid()}"
    directory.mkdir(mode=0o755)
    try:
        write_run(directory, "mine").path.chmod(0o600)
        said = in_child(lambda: told(record_checks(directory)), uid=12001)
        assert said.startswith("warn 1 record of other users cannot be read: mine.0.")
        directory.chmod(0o3733)
        assert in_child(lambda: told(record_checks(directory)), uid=12001).startswith("ok only the daemon may list")
    finally:
        shutil.rmtree(directory)


def test_a_rank_that_is_silent_is_named_and_one_that_ended_is_not(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SILENT_SECONDS", -1.0)
    write_run(place, "ended")
    with rank(place, name="stuck", rank=3):
        said = told(record_checks(place))
    assert re.match("warn no progress for up to .*: rank 3 of stuck\n", said) and "of ended" not in said


def test_too_many_old_records_are_a_warning(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(place)
    monkeypatch.setattr(records, "KEPT_RECORDS", 0)
    assert told(record_checks(place)).startswith("warn 0 living ranks, 1 ended record: each user's next run keeps")
    assert KEPT_RECORDS > 1


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_shows_every_subject_and_what_to_do(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records.mkdir(mode=0o777)
    records.chmod(0o777)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "fail  directory" in shown and "→ `chmod 0700" in shown
    subjects = ("versions", "directory", "free space", "records", "daemon", "port", "NVML", "clock")
    for about in (*subjects, "shared memory", "limits", "processes"):
        assert about in shown, about
    records.chmod(0o700)
    (records / "bad.gpw").touch()
    assert main(["doctor", "--dir", str(records)]) == 0


def test_the_command_as_json_has_the_same_checks(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(records, "an\x1b[31m odd run", state=State.CLEAN)
    assert stat.S_IMODE(records.stat().st_mode) == 0o700
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["state"] in ("ok", "warn")
    assert {frozenset(check) for check in document["checks"]} == {frozenset(("about", "state", "said", "todo"))}


def test_the_worst_state_decides() -> None:
    fine, doubtful, broken = (Check("x", state, "said", "todo") for state in ("ok", "warn", "fail"))
    assert [doctor.status(each) for each in ([fine], [fine, doubtful], [broken, fine])] == [0, 0, 1]
    assert json.loads(doctor.as_json([fine, broken, doubtful]))["state"] == "fail"


def test_it_needs_no_torch(records: Path) -> None:
    code = "import sys; from gpuwatch.cli import main; main(['doctor']); print('torch' in sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=180)
    assert done.stderr == "False\n"
