"""Snapshot files: what is read, and what is refused, with one line and nothing run."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from gpuwatch.allocator.document import compare, explain
from gpuwatch.allocator.parsing import parse_snapshot, read_snapshot
from gpuwatch.allocator.reading import SnapshotError, bounded_memory
from gpuwatch.cli import main
from tests.tracemaking import random_run

RAN = "ran-by-a-pickle"


class Malicious:
    """Creates a directory when it is unpickled."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.place,)


def refused(capsys: pytest.CaptureFixture[str], path: Path, *more: str) -> str:
    """What the two commands say of a file that they cannot use: one line each, exit status 2."""
    said = ""
    for command in ("snapshot", "replay"):
        assert main([command, str(path), *more]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("gpuwatch: "), shown
        assert str(path) in shown.err
        said += shown.err
    return said


def written(tmp_path: Path, content: object, protocol: int = 4) -> Path:
    """A file as torch writes it."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content, protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], protocol: int
) -> None:
    place = tmp_path / RAN
    content: Any = random_run(1, "", 20).snapshot()
    content["device_traces"][0][3]["frames"] = Malicious(str(place))
    assert "refused: the file asks to load" in refused(capsys, written(tmp_path, content, protocol))
    assert not place.exists()
    pickle.loads(written(tmp_path, content, protocol).read_bytes())  # the trap itself works
    assert place.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04(S'true'\nios\nsystem\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02P7\n.",
        b"\x80\x04X\x03\x00\x00\x00abcQ.",
    ],
)
def test_every_way_to_name_a_global_is_refused(
    tmp_path: Path, opcodes: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(opcodes)
    refused(capsys, path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04rest", "not a pickle"),
        (b'{"segments": []}', "not a pickle"),
        (pickle.dumps(7), "holds a int without segments"),
        (pickle.dumps({"weights": [1]}), "holds a dict without segments"),
        (pickle.dumps({"segments": {}}), "its segments are a dict, not a list"),
        (pickle.dumps({"segments": [], "device_traces": 5}), "its device_traces are a int"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "nothing was allocated on a GPU"),
    ],
)
def test_what_is_no_snapshot_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    assert said in refused(capsys, path)


def test_a_file_that_cannot_be_opened_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(capsys, tmp_path / "absent.pickle")
    assert "directory" in refused(capsys, tmp_path)


def test_a_snapshot_without_events_is_explained_but_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, {**random_run(1, "", 30).snapshot(), "device_traces": []})
    assert main(["snapshot", str(path)]) == 0
    assert "in use" in capsys.readouterr().out
    assert main(["replay", str(path)]) == 2
    assert "_record_memory_history" in capsys.readouterr().err


def test_a_file_cut_off_anywhere_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = pickle.dumps(random_run(1, "", 20).snapshot())
    path = tmp_path / "snapshot.pickle"
    for length in random.Random(5).sample(range(1, len(whole)), 60):
        path.write_bytes(whole[:length])
        with pytest.raises(SnapshotError) as said:
            read_snapshot(path)
        assert "\n" not in str(said.value)
    assert "cut off or damaged" in refused(capsys, path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=some.data())
def test_damaged_bytes_never_raise_anything_else(tmp_path: Path, data: some.DataObject) -> None:
    content = bytearray(DAMAGED)
    for _ in range(data.draw(some.integers(1, 6))):
        content[data.draw(some.integers(2, len(content) - 1))] = data.draw(some.integers(0, 255))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with bounded_memory(path):
        try:
            snapshot = read_snapshot(path)
            explain(snapshot)
            compare(snapshot)
        except SnapshotError as error:
            assert "\n" not in str(error)


DAMAGED = pickle.dumps(random_run(2, "", 6).snapshot())

LEAVES = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(-5, 1 << 70),
    some.text(max_size=3),
    some.floats(),
    some.binary(max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(data=some.data())
def test_fields_of_any_type_are_left_out_not_believed(data: some.DataObject) -> None:
    content: Any = pickle.loads(DAMAGED)
    places = [content, *content["segments"], *content["device_traces"][0]]
    places += [block for segment in content["segments"] for block in segment["blocks"]]
    for _ in range(data.draw(some.integers(1, 8))):
        place = data.draw(some.sampled_from(places))
        place[data.draw(some.sampled_from(sorted(place)))] = data.draw(
            some.one_of(LEAVES, some.lists(LEAVES, max_size=2))
        )
    try:
        snapshot = parse_snapshot(content)
        explain(snapshot)
        compare(snapshot)
    except SnapshotError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x80\x04]r\xff\xff\xff\x7f.",  # a memo of 2^31 entries
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 42) + b"x.",  # a byte array of 4 TiB
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 42) + b"x.",  # a text of 4 TiB
        b"\x80\x04" + b"\x8f" * 4_000_000 + b".",  # a set, 216 bytes, for each byte
    ],
    ids=["memo", "bytearray", "text", "sets"],
)
def test_a_memory_bomb_ends_in_one_line_with_bounded_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bomb: bytes
) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(bomb)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    assert main(["snapshot", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_lists_that_hold_each_other_many_times_are_not_walked(tmp_path: Path) -> None:
    nested: list[object] = []
    for _ in range(60):
        nested = [nested] * 10
    content: Any = random_run(1, "", 10).snapshot()
    content["device_traces"][0][0]["frames"] = nested
    content["segments"].append(nested)
    snapshot = read_snapshot(written(tmp_path, content))
    assert snapshot.skipped_events == 1


def test_the_live_dictionary_is_taken_as_it_is() -> None:
    content = random_run(3, "", 40).snapshot()
    stream = io.BytesIO()
    pickle.dump(content, stream)
    live, read_back = parse_snapshot(content), parse_snapshot(pickle.loads(stream.getvalue()))
    assert live.devices[0].segments == read_back.devices[0].segments
    assert live.owners == read_back.owners
