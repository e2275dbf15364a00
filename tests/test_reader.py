"""The flight record, reading end: it believes nothing, sees nothing half, and harms nobody."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch.layout import (
    MAGIC,
    OBSERVATION_BYTES,
    OBSERVATIONS_AT,
    RECORD_BYTES,
    RING_AT,
    SCHEMA_AT,
    SUFFIX,
    VALUES_AT,
    VERSION,
    Column,
    State,
    Word,
)
from gpuwatch.reader import RecordError, read, read_all, remove_old
from gpuwatch.record import RecordWriter
from tests.recorded import write_run

READS = 1_000_000


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A sound record of an ended run."""
    return write_run(tmp_path / "records", observations=[("debug-anomaly", "train.py:3", "on", 60.0)]).path


def put(path: Path, at: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


def word(number: int) -> bytes:
    return struct.pack("=Q", number)


# -- files that are no records -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 7, 100, VALUES_AT, RECORD_BYTES - 1, RECORD_BYTES + 1])
def test_a_file_of_another_size_is_refused(record: Path, size: int) -> None:
    os.truncate(record, size)
    with pytest.raises(RecordError, match=f"has {size} bytes, a record has {RECORD_BYTES}"):
        read(record)


def test_a_file_that_shrinks_while_it_is_read_is_no_harm(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its size is right when it is asked for, and wrong by the time of each read after that.
    pread = os.pread

    def shrinking(file: int, size: int, at: int) -> bytes:
        return pread(file, size, at)[: size // 2] if at else pread(file, size, at)

    monkeypatch.setattr(os, "pread", shrinking)
    with contextlib.suppress(RecordError):
        read(record)


def test_a_link_is_not_followed(record: Path) -> None:
    link = record.with_name(f"link{SUFFIX}")
    link.symlink_to(record)
    with pytest.raises(OSError, match="Too many levels"):
        read(link)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / f"pipe{SUFFIX}"
    os.mkfifo(pipe)
    began = time.monotonic()
    with pytest.raises(RecordError, match="not a regular file"):
        read(pipe)
    assert time.monotonic() - began < 20


def test_a_directory_is_refused(tmp_path: Path) -> None:
    place = tmp_path / f"place{SUFFIX}"
    place.mkdir()
    with pytest.raises(RecordError, match="not a regular file"):
        read(place)


def test_a_device_is_refused() -> None:
    with pytest.raises(RecordError, match="not a regular file"):
        read(Path("/dev/zero"))


def test_another_magic_is_refused(record: Path) -> None:
    put(record, 0, b"NOTMINE!")
    with pytest.raises(RecordError, match=f"does not begin with {MAGIC.decode()}"):
        read(record)


@pytest.mark.parametrize("version", [0, VERSION + 1, 2**64 - 1])
def test_another_version_is_refused(record: Path, version: int) -> None:
    put(record, 8 * Word.VERSION, word(version))
    with pytest.raises(RecordError, match=f"layout version {version}, this reader knows {VERSION}"):
        read(record)


@pytest.mark.parametrize(
    "schema",
    [
        b"",
        b"not json\n",
        b"[]\n",
        b"null\n",
        b'{"rank": 0}\n',
        b'{"run": "x", "rank": "first"}\n',
        b'{"run": "x", "rank": 0}\n["name"]\n',
        b'{"run": "x", "rank": 0}\n["name", {"a": 1}]\n',
        b'{"run": "x", "rank": 0}\n{"name": 1, "labels": 2}\n',
        b'{"run": "x", "rank": 0}\n[1, {}]\n',
        b'{"run": "x", "rank": 0}\n["name", "labels"]\n',
        b"[" * 30_000,
        b"\xff\xfe\x00",
        b'{"run": "x", "rank": ' + b"9" * 5000 + b"}\n",
    ],
)
def test_a_schema_of_any_other_shape_is_refused(record: Path, schema: bytes) -> None:
    put(record, SCHEMA_AT, schema)
    put(record, 8 * Word.SCHEMA_USED, word(len(schema)))
    with pytest.raises(RecordError, match="holds no valid schema"):
        read(record)


@pytest.mark.parametrize("place", Word)
@pytest.mark.parametrize("number", [0, 1, 7, 255, 2**31, 2**63, 2**64 - 1])
def test_any_number_in_a_word_of_the_header_is_read_or_refused(record: Path, place: Word, number: int) -> None:
    put(record, 8 * place, word(number))
    with contextlib.suppress(RecordError):
        seen = read(record)
        assert len(seen.ring) < 3000 and len(seen.observations) <= 64 and len(seen.values) <= 1024


def test_random_bytes_are_read_or_refused(record: Path) -> None:
    chance = random.Random(7)
    sound = record.read_bytes()
    for _ in range(150):
        content = bytearray(sound)
        begin = chance.choice([0, 16, VALUES_AT, RING_AT, OBSERVATIONS_AT, SCHEMA_AT])
        length = chance.choice([1, 8, 100, 4000])
        content[begin : begin + length] = chance.randbytes(length)
        record.write_bytes(content)
        with contextlib.suppress(RecordError):
            read(record)
    record.write_bytes(chance.randbytes(RECORD_BYTES))
    with pytest.raises(RecordError):
        read(record)


def test_one_bad_file_does_not_hide_the_others(record: Path) -> None:
    directory = record.parent
    (directory / f"short{SUFFIX}").write_bytes(b"short")
    (directory / f"link{SUFFIX}").symlink_to(record)
    os.mkfifo(directory / f"pipe{SUFFIX}")
    (directory / f".hidden{SUFFIX}").write_bytes(b"being made")
    (directory / "README").write_text("not ours")
    snapshots, rejected = read_all(directory)
    assert [seen.path for seen in snapshots] == [record]
    assert {name for name, _ in rejected} == {f"short{SUFFIX}", f"link{SUFFIX}", f"pipe{SUFFIX}"}
    assert all("\n" not in reason for _, reason in rejected)


def test_a_directory_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert read_all(tmp_path / "nowhere") == ([], [])
    assert remove_old(tmp_path / "nowhere", 3) == 0


def test_two_runs_of_one_name_are_told_apart_by_time(tmp_path: Path) -> None:
    first = write_run(tmp_path, "train", steps=120)
    second = write_run(tmp_path, "train", steps=80, state=None)
    snapshots, _ = read_all(tmp_path)
    assert [(seen.run, seen.step, seen.path) for seen in snapshots] == [
        ("train", 120, first.path),
        ("train", 80, second.path),
    ]
    assert snapshots[0].created < snapshots[1].created
    assert [seen.ended is None for seen in snapshots] == [False, True]


# -- reading while a process writes ------------------------------------------------------------------------------------

TEARING = """
import struct, sys
from pathlib import Path
from gpuwatch.layout import Column, Word
from gpuwatch.record import RecordWriter

writer = RecordWriter(Path(sys.argv[1]), {"run": "tearing", "rank": 0})
index = writer.series("pair")
print("ready", flush=True)
# Equal halves: every one of these numbers has the same four bytes twice.
pairs = [struct.unpack("=d", struct.pack("=II", half, half))[0] for half in range(0x01000000, 0x7F000000, 0x00F0F0F1)]
words = [half << 32 | half for half in range(0, 1 << 32, 0x01010103)]
values, head = writer.values, writer.words
number = 0
while True:
    for word in words:
        head[Word.STEP] = word
        values[index] = pairs[number % len(pairs)]
        number += 1
    for _ in range(40):
        writer.step_row(*[float(number)] * len(Column))
        number += 1
    writer.observe("rule", "here", chr(97 + number % 26) * (1 + number % 500), number)
"""


@pytest.fixture
def tearing(tmp_path: Path) -> Iterator[Path]:
    """The record of a process that stores as fast as it can."""
    command = [sys.executable, "-c", TEARING, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield next(tmp_path.glob(f"*{SUFFIX}"))
    process.kill()
    process.wait()
    process.stdout.close()


def test_no_value_is_torn_in_a_million_reads(tearing: Path) -> None:
    file = os.open(tearing, os.O_RDONLY)
    reads = torn = 0
    different: set[bytes] = set()
    began = time.monotonic()
    try:
        while reads < READS:
            for at in (VALUES_AT, 8 * Word.STEP):
                cell = os.pread(file, 8, at)
                reads += 1
                if cell[:4] != cell[4:] and cell != b"\0\0\0\0\0\0\xf8\x7f":  # not known yet
                    torn += 1
                if reads % 1000 < 2:
                    different.add(cell)
    finally:
        os.close(file)
    assert (reads, torn) == (READS, 0)
    assert len(different) > 50, "the writer went on meanwhile"
    assert time.monotonic() - began < 300


def test_rows_are_never_torn_while_the_ring_wraps(tearing: Path) -> None:
    heads: set[float] = set()
    deadline = time.monotonic() + 120
    while len(heads) < 30:
        assert time.monotonic() < deadline, "the writer does not go on"
        ring = read(tearing).ring
        for cells in ring:
            assert len(set(cells)) == 1, "a row of two steps"
        numbers = [cells[Column.NUMBER] for cells in ring]
        assert numbers == sorted(numbers)
        heads.update(numbers[-1:])


def test_observations_are_never_torn_while_they_are_rewritten(tearing: Path) -> None:
    seen: set[float] = set()
    deadline = time.monotonic() + 120
    while len(seen) < 200:
        assert time.monotonic() < deadline, "the writer does not go on"
        for letter_count, magnitude, evidence in observations_of(tearing):
            assert evidence == chr(97 + int(magnitude) % 26) * letter_count
            assert letter_count == 1 + int(magnitude) % 500
            seen.add(magnitude)


def observations_of(path: Path) -> Iterator[tuple[int, float, str]]:
    for observation in read(path).observations:
        yield len(observation.evidence), observation.magnitude, observation.evidence


def test_an_observation_that_is_half_written_is_left_out(record: Path) -> None:
    put(record, OBSERVATIONS_AT, word(5))  # odd: the writer was killed in the midst of it
    assert read(record).observations == ()
    assert len(read(record).ring) == 200


def test_an_observation_whose_text_is_damaged_is_left_out(record: Path) -> None:
    put(record, OBSERVATIONS_AT + OBSERVATION_BYTES // 32, b"\xff" * 40)
    assert read(record).observations == ()


def test_a_reader_disturbs_no_writer(tmp_path: Path) -> None:
    writer = write_run(tmp_path, state=None)
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            os.stat(writer.path)

    thread = threading.Thread(target=poll)
    thread.start()
    for step in range(20_000):
        writer.words[Word.STEP] = step
    stop.set()
    thread.join()
    assert writer.snapshot().step == 19_999


def test_ages_are_of_the_nodes_own_clock(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, {"run": "train", "rank": 0})
    assert read(writer.path).step_age is None, "no step yet: not known"
    # the read above dropped this process's own lease, which is of no matter here
    writer.words[Word.STEP_TIME] = time.monotonic_ns() - 5_000_000_000
    writer.words[Word.HEARTBEAT] = time.monotonic_ns() + 5_000_000_000
    seen = read(writer.path)
    assert seen.step_age == pytest.approx(5, abs=2)
    assert seen.progress_age == 0, "never negative"
    writer.close(State.CLEAN)
