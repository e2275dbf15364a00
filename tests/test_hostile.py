"""Records of hostile and careless users: what they can do to the daemon, to its readers and to each other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as any_of
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gpuwatch import exporter as exporting
from gpuwatch import follower, inventory, recordparts, service
from gpuwatch.catalog import GUARD_FAULTS
from gpuwatch.exporter import RANKS_PER_USER, TOMBSTONE_SECONDS, Exporter
from gpuwatch.inventory import take_inventory, troubles
from gpuwatch.layout import RECORD_BYTES, Word
from gpuwatch.lifecycle import Claims
from gpuwatch.nvml import GpuReading, NvmlUnavailable
from gpuwatch.page import page as status_page
from gpuwatch.postmortem import document as post_mortem
from gpuwatch.rankseries import OBSERVATIONS_FIRST, SERIES_LIMIT, clean
from gpuwatch.reader import RecordError, read
from gpuwatch.report.document import document
from gpuwatch.report.html import page
from gpuwatch.sampler import Sampler
from tests.recorded import write_run
from tests.serving import ROOT, daemon, environment, eventually, rank, series

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def no_gpus() -> list[GpuReading]:
    raise NvmlUnavailable("no GPU telemetry: this is a test")


def scrape(directory: Path) -> dict[str, float]:
    return series(Exporter(directory, Sampler(no_gpus)).text())


# -- room and numbers --------------------------------------------------------------------------------------------------


def test_a_directory_says_how_much_it_holds_and_what_is_left(records: Path) -> None:
    write_run(records)
    (records / "junk").write_bytes(b"x" * 100_000)
    found = scrape(records)
    assert found["gpuwatch_directory_files"] == 2
    assert found["gpuwatch_directory_bytes"] >= RECORD_BYTES + 100_000
    assert found["gpuwatch_directory_free_bytes"] == pytest.approx(shutil.disk_usage(records).free, rel=0.1)
    assert troubles(take_inventory(records)) == []


def test_what_fills_up_is_said(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        (records / "x").parent.mkdir(exist_ok=True)
        (records / f"{number}.gpw").write_bytes(b"x" * 5000)
    monkeypatch.setattr(inventory, "LEAST_FREE_BYTES", 1 << 60)
    monkeypatch.setattr(inventory, "LARGE_BYTES", 10_000)
    monkeypatch.setattr(inventory, "RECORDS_PER_USER", 4)
    free, large, passed_over = troubles(take_inventory(records))
    assert free.startswith("only ") and "runs that start may not be recorded" in free
    assert large.startswith("the directory of records takes ") and large.endswith(" in 6 files")
    assert passed_over == "2 records are passed over: of a user the newest 4 are read"
    monkeypatch.setattr(inventory, "FILES_LIMIT", 3)
    assert any("holds over 3 files" in line for line in troubles(take_inventory(records)))
    found = scrape(records)
    assert found['gpuwatch_records_rejected{reason="limit"}'] == 1
    assert found['gpuwatch_records_rejected{reason="size"}'] == 3


def test_the_daemon_warns_of_a_directory_that_fills_up_once(records: Path) -> None:
    code = "import sys; from gpuwatch import inventory; inventory.LARGE_BYTES = 1; from tests import serving; "
    code += "exec(serving._SERVE)"
    records.mkdir()
    (records / "junk").write_bytes(b"x" * 10_000)
    command = [sys.executable, "-c", code, "127.0.0.1:0", str(records), "{}"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "serving" in process.stderr.readline()
    assert process.stderr.readline().startswith("gpuwatch: warning: the directory of records takes ")
    (records / "more").write_bytes(b"x" * 10_000)
    time.sleep(2.5)
    process.terminate()
    assert process.communicate(timeout=60)[1] == ""


def test_one_user_cannot_exceed_the_budget(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "leased", lambda file: True)
    monkeypatch.setattr(exporting, "RANKS_PER_USER", 5)
    for number in range(8):
        writer = write_run(records, rank=number, steps=50, state=None)
        for probe in range(400):
            writer.values[writer.series(GUARD_FAULTS.name, probe=f"p{probe}")] = 1.0
        for place in range(64):
            writer.observe("debug-anomaly", f"train.py:{place}", "on", 1.0)
    found = scrape(records)
    ranks = {label[1] for key in found if (label := re.search(r'[{,]rank="(\d+)"', key))}
    assert len(ranks) == 5 < RANKS_PER_USER
    for each in ranks:
        mine = [key for key in found if f'rank="{each}"' in key]
        assert len(mine) == SERIES_LIMIT
        assert sum("gpuwatch_observation" in key for key in mine) >= OBSERVATIONS_FIRST
    assert found["gpuwatch_series_dropped"] > 5 * 250


def test_a_long_run_is_not_lost_among_many_short_ones(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "RECORDS_PER_USER", 3)
    with rank(records, name="long"):
        (long,) = records.glob("*.gpw")
        os.utime(long, (1000, 1000))  # its stores do not touch them
        for number in range(5):
            write_run(records, f"short{number}")
        exporter = Exporter(records, Sampler(no_gpus))
        for _ in range(2):
            assert series(exporter.text())['gpuwatch_rank_up{rank="0",run="long"}'] == 1
        assert len(take_inventory(records, inventory.Leases()).entries) == 3
        assert long not in {entry.path for entry in take_inventory(records).entries}
    assert long not in {entry.path for entry in take_inventory(records, inventory.Leases()).entries}


@as_root
def test_whoever_says_too_much_takes_no_room_of_other_users(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "leased", lambda file: True)
    write_run(records, state=None)
    one = sum('rank="0"' in key for key in scrape(records))
    monkeypatch.setattr(exporting, "SERIES_OF_ALL", 3 * one)
    for number in range(1, 6):
        write_run(records, rank=number, state=None)
    os.chown(write_run(records, "theirs", state=None).path, 1234, -1)
    found = scrape(records)
    ups = [key for key in found if key.startswith("gpuwatch_rank_up")]
    assert len(ups) == 3 and 'gpuwatch_rank_up{rank="0",run="theirs"}' in ups
    assert found["gpuwatch_series_dropped"] == 4 * one


@pytest.mark.parametrize("job", ["stack/prometheus/prometheus.yml", "kubernetes/podmonitor.yaml"])
def test_no_record_makes_a_scrape_more_than_the_scrape_jobs_take(records: Path, job: str) -> None:
    write_run(records, "\U0001f600" * 500)
    text = (ROOT / "deploy" / job).read_text("utf-8")
    (longest,) = re.findall(r"(?:label_value_length_limit|labelValueLengthLimit): (\d+)", text)
    (samples,) = re.findall(r"(?:sample_limit|sampleLimit): (\d+)", text)
    labels = [label for key in scrape(records) for label in re.findall(r'="([^"]*)"', key)]
    assert 512 < max(len(label.encode()) for label in labels) < int(longest)
    assert RANKS_PER_USER * SERIES_LIMIT < exporting.SERIES_OF_ALL < int(samples)


def test_a_file_that_is_no_record_is_not_taken_apart_at_every_scrape(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.mkdir()
    bad = records / "bad.gpw"
    bad.write_bytes(b"x" * RECORD_BYTES)
    exporter = Exporter(records, Sampler(no_gpus))
    opened: list[Path] = []

    def noted(path: Path) -> contextlib.AbstractContextManager[tuple[int, os.stat_result]]:
        opened.append(path)
        return recordparts.opened(path)

    monkeypatch.setattr(follower, "opened", noted)
    for _ in range(3):
        assert series(exporter.text())['gpuwatch_records_rejected{reason="magic"}'] == 1
    assert opened == [bad]
    write_run(records).path.rename(bad)  # written anew: looked at anew
    assert series(exporter.text())["gpuwatch_records"] == 1


# -- names and text ----------------------------------------------------------------------------------------------------

HOSTILE = [
    'x"} 1\ngpuwatch_rank_up{run="forged",rank="0"} 1\n#',
    "</title><script>alert(1)</script>",
    "\\",
    '\\"',
    "{{ $labels.run }}",
    "a: b\n- c",
    "\x1b[31mred\x07",
    "\u202etxt.exe",
    "../../etc/passwd",
    "\ud800",
    " ",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_only_a_name(records: Path, name: str) -> None:
    observed = [("debug-anomaly", name, name, 60.0)]
    identity = {"script": name, "torch": name, "node": name, "job_id": name}
    writer = write_run(records, name, observations=observed, identity=identity)
    assert writer.path.parent == records
    found = scrape(records)
    ups = [key for key in found if key.startswith("gpuwatch_rank_up")]
    assert len(ups) == 1 and "forged" not in ups[0].partition("{")[0]
    exporter = Exporter(records, Sampler(no_gpus))
    families = list(text_string_to_metric_families(exporter.text(openmetrics=True)))  # type: ignore[no-untyped-call]
    [labels] = [sample.labels for family in families for sample in family.samples if sample.name == "gpuwatch_rank_up"]
    assert labels == {"run": clean(name), "rank": "0"}
    snapshot = read(writer.path)
    shown = status_page(records, Sampler(no_gpus)).decode()
    for text in (shown, page(document([snapshot]))):
        assert "<script>" not in text and "\x1b" not in text and "\ud800" not in text
    for content in (document([snapshot]), post_mortem(snapshot)):
        assert json.loads(json.dumps(content)) == content


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    any_of.text(max_size=300),
    any_of.lists(
        any_of.tuples(
            any_of.one_of(any_of.just(GUARD_FAULTS.name), any_of.text(max_size=30)),
            any_of.dictionaries(
                any_of.one_of(any_of.just("probe"), any_of.text(max_size=9)), any_of.text(), max_size=2
            ),
            any_of.floats(),
        ),
        max_size=6,
    ),
)
def test_whatever_a_record_names_the_text_is_well_formed(
    tmp_path: Path, name: str, named: list[tuple[str, dict[str, str], float]]
) -> None:
    records = tmp_path / "records"
    shutil.rmtree(records, ignore_errors=True)
    writer = write_run(records, name or "run", steps=50, state=None)
    for metric, labels, number in named:
        with contextlib.suppress(ValueError):
            line = json.dumps([metric, labels])
            writer._line(json.loads(line))
            writer.values[writer.words[Word.SERIES]] = number
            writer.words[Word.SERIES] += 1
    exporter = Exporter(records, Sampler(no_gpus))
    series(exporter.text())
    list(text_string_to_metric_families(exporter.text(openmetrics=True)))  # type: ignore[no-untyped-call]


@as_root
def test_a_run_of_another_user_is_not_shown_as_ones_own(records: Path) -> None:
    mine = write_run(records, "train", steps=100)
    theirs = write_run(records, "train", steps=200)
    third = write_run(records, "train@4242", steps=300)
    os.chown(theirs.path, 4242, 4242)
    os.chown(third.path, 4343, 4343)
    exporter = Exporter(records, Sampler(no_gpus))
    for _ in range(2):
        found = series(exporter.text())
        steps = {key: number for key, number in found.items() if key.startswith("gpuwatch_rank_last_step")}
        assert steps == {
            'gpuwatch_rank_last_step{rank="0",run="train"}': 100,
            'gpuwatch_rank_last_step{rank="0",run="train@4242"}': 200,
            'gpuwatch_rank_last_step{rank="0",run="train@4242@4343"}': 300,
        }
    assert mine.path.exists()


def test_who_came_first_keeps_the_name_as_long_as_the_records_are_there() -> None:
    claims = Claims()
    assert [claims.label(uid, "train") for uid in (7, 8, 7, 9)] == ["train", "train@8", "train", "train@9"]
    claims.keep({(8, "train"), (9, "train")})
    assert [claims.label(uid, "train") for uid in (8, 9, 7)] == ["train@8", "train@9", "train"]


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_clock_that_jumps_moves_no_tombstone(records: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    write_run(records)
    exporter = Exporter(records, Sampler(no_gpus))
    up = 'gpuwatch_rank_up{rank="0",run="train"}'
    assert series(exporter.text())[up] == 0
    now, monotonic = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    assert series(exporter.text())[up] == 0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + TOMBSTONE_SECONDS + 1)
    assert up not in series(exporter.text())


def test_a_record_from_the_future_is_a_record(records: Path) -> None:
    path = write_run(records).path
    with path.open("r+b") as file:
        for word in (Word.CREATED, Word.HEARTBEAT, Word.ENDED, Word.STEP_TIME):
            file.seek(8 * word)
            file.write(struct.pack("=Q", 2**62))
    found = scrape(records)
    assert found['gpuwatch_rank_up{rank="0",run="train"}'] == 0
    status_page(records, Sampler(no_gpus))


# -- the daemon's surroundings -----------------------------------------------------------------------------------------


def test_a_directory_removed_and_made_anew_is_served_again(records: Path) -> None:
    with daemon(records) as served:
        records.rename(records.with_name("gone"))  # at once: between two files removed it may make one anew
        assert served.get("/-/ready").status == 503
        assert served.get("/metrics").status == 200
        with rank(records):
            eventually(lambda: served.scrape().get('gpuwatch_rank_up{rank="0",run="train"}') == 1)
            eventually(lambda: service.running(records) == served.url)
        code, errors = served.stop()
    assert code == 0
    assert f"gpuwatch: {records} was made anew: serving it\n" in errors


def test_a_full_disk_keeps_no_daemon_from_serving(records: Path) -> None:
    from tests import serving

    # No file may grow: what a full disk does to a process, without one.
    command = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", sys.executable, "-W", "error", "-c", serving._SERVE]
    process = subprocess.Popen(
        [*command, "127.0.0.1:0", str(records), "{}"], env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    url = process.stderr.readline().split()[2]
    assert "cannot write down in" in process.stderr.readline()
    served = serving.Daemon(process, url)
    with rank(records, steps=841):
        eventually(lambda: served.scrape().get('gpuwatch_rank_up{rank="0",run="train"}') == 1)
    assert process.stderr.readline() == f"gpuwatch: cannot write post-mortems into {records}: File too large\n"
    found = served.scrape()
    assert found['gpuwatch_rank_last_step{rank="0",run="train"}'] == 841
    code, errors = served.stop()
    assert (code, errors) == (0, "")


def test_a_record_that_changes_under_the_reader_is_refused_or_read(records: Path) -> None:
    path = write_run(records).path
    content = path.read_bytes()
    exporter = Exporter(records, Sampler(no_gpus))
    for damage in (b"", content[:100], content[:-1], b"\0" * len(content), content + b"x", content):
        path.write_bytes(damage)
        series(exporter.text())
        with contextlib.suppress(RecordError):
            read(path)
