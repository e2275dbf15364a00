from __future__ import annotations

import math
import os
import random
import re
import struct
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gpuwatch import exporter as exporting
from gpuwatch import follower
from gpuwatch.catalog import METRICS, SCOPES, STEP_BOUNDS, UNPUBLISHED
from gpuwatch.exporter import Exporter
from gpuwatch.expr import series_key
from gpuwatch.layout import RECORD_BYTES, SCHEMA_AT, State, Word
from gpuwatch.nvml import GpuReading, NvmlUnavailable
from gpuwatch.page import page
from gpuwatch.postmortem import document
from gpuwatch.rankseries import SERIES_LIMIT
from gpuwatch.reader import RecordError, read
from gpuwatch.record import RecordWriter
from gpuwatch.sampler import Sampler
from tests.recorded import row, write_run
from tests.serving import eventually, rank, series


def no_gpus() -> list[GpuReading]:
    raise NvmlUnavailable("no GPU telemetry: this is a test")


def exporter(directory: Path, sampler: Sampler | None = None) -> Exporter:
    return Exporter(directory, sampler or Sampler(no_gpus))


def scrape(exporting: Exporter) -> dict[str, float]:
    return series(exporting.text())


def of(found: dict[str, float], name: str, run: str = "train", rank: str = "0", **labels: str) -> float | None:
    return found.get(series_key(name, {"run": run, "rank": rank, **labels}))


def set_word(record: Path, word: Word, number: int) -> None:
    with record.open("r+b") as file:
        file.seek(8 * word)
        file.write(struct.pack("=Q", number))


def test_a_living_rank_is_published_with_everything_it_says(records: Path) -> None:
    observed = [("debug-anomaly", 'train.py:"3"\\', "anomaly mode is on", 2.0)]
    identity = {"local_rank": 3, "restart": None}
    with rank(records, rank=3, steps=200, observations=observed, identity=identity) as process:
        found = scrape(exporter(records))
        assert of(found, "gpuwatch_rank_up", rank="3") == 1
        assert of(found, "gpuwatch_rank_ended", rank="3") == 0
        assert of(found, "gpuwatch_steps_total", rank="3") == 200
        assert of(found, "gpuwatch_phase_seconds_total", rank="3", phase="backward") == pytest.approx(8.0)
        assert of(found, "gpuwatch_window_step_seconds", rank="3", quantile="0.99") == pytest.approx(0.1)
        assert of(found, "gpuwatch_observation", rank="3", rule="debug-anomaly", where='train.py:"3"\\') == 2
        age = of(found, "gpuwatch_rank_progress_age_seconds", rank="3")
        assert age is not None and 0 <= age < 10
        info = {"local_rank": "3", "world_size": "1", "pid": str(process.pid), "restart": "", "script": "train.py"}
        [key] = [key for key in found if key.startswith("gpuwatch_rank_info{")]
        assert all(f'{label}="{text}"' in key for label, text in {**info, "torch": "2.13.0+cpu"}.items())
        assert not any("rank_exit_info" in key or "hostname" in key for key in found)


def test_every_series_carries_its_metrics_own_labels_and_no_other(records: Path) -> None:
    write_run(records, observations=[("debug-anomaly", "train.py:3", "on", 1.0)])
    for family in text_string_to_metric_families(exporter(records).text(openmetrics=True)):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            metric = METRICS.get(sample.name) or METRICS[family.name]
            bucket = {"le"} if sample.name.endswith("_bucket") else set()
            assert set(sample.labels) == {*SCOPES[metric.scope], *metric.labels, *bucket}


def test_the_exposition_is_openmetrics_too(records: Path) -> None:
    add_histogram(write_run(records, state=None))
    text = exporter(records).text(openmetrics=True)
    families = {family.name: family.type for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    assert families["gpuwatch_steps"] == "counter"
    assert families["gpuwatch_step_seconds"] == "histogram"
    assert families["gpuwatch_window_step_seconds"] == "summary"
    assert families["gpuwatch_rank"] == "info"


def add_histogram(writer: RecordWriter, leave_out: str | None = None) -> None:
    for position, bound in enumerate((*(f"{bound:g}" for bound in STEP_BOUNDS), "+Inf")):
        if bound != leave_out:
            index = writer.counter("gpuwatch_step_seconds_bucket", le=bound)
            writer.values[index] = {STEP_BOUNDS.index(0.1): 190, STEP_BOUNDS.index(2.0): 9}.get(position, 0)
            if bound == "+Inf":
                writer.values[index] = 1
    writer.values[writer.counter("gpuwatch_step_seconds_sum")] = 123.5
    writer.close(State.CLEAN)


def test_the_records_counts_by_bucket_become_a_cumulative_histogram(records: Path) -> None:
    add_histogram(write_run(records, state=None))
    found = scrape(exporter(records))
    counts = [of(found, "gpuwatch_step_seconds_bucket", le=bound) for bound in ("0.05", "0.1", "1.0", "2.0", "+Inf")]
    assert counts == [0, 190, 190, 199, 200]
    assert of(found, "gpuwatch_step_seconds_count") == 200
    assert of(found, "gpuwatch_step_seconds_sum") == 123.5
    assert not any("series_dropped" in key and number for key, number in found.items())


def test_a_histogram_that_lacks_a_bucket_is_not_published(records: Path) -> None:
    add_histogram(write_run(records, state=None), leave_out="0.5")
    assert not any("step_seconds_bucket" in key for key in scrape(exporter(records)))


def test_only_what_the_catalog_knows_is_published_and_the_rest_is_counted(records: Path) -> None:
    writer = write_run(records, state=None, observations=[("no-such-rule", "train.py:3", "?", 1.0)])
    for name, labels in (
        ("evil", {}),
        ("gpuwatch_evil_total", {}),
        ("gpuwatch_batches_total", {"hostname": "node7"}),
        ("gpuwatch_phase_seconds_total", {}),
        ("gpuwatch_gpu_power_watts", {}),
        ("gpuwatch_source_up", {"source": "nvml"}),
        ("gpuwatch_observation", {"rule": "run-dead", "where": "x"}),
        ("gpuwatch_step_seconds", {}),
    ):
        writer.values[writer.series(name, **labels)] = 7.0
    writer.values[writer.series("gpuwatch_rank_up")] = 0.5
    writer.values[writer.series("gpuwatch_alloc_retries_total")] = -1.0
    writer.values[writer.series("gpuwatch_ooms_total")] = math.inf
    writer.values[writer.series("gpuwatch_device_memory_capacity_bytes")] = math.nan
    writer.close(State.CLEAN)
    found = scrape(exporter(records))
    assert found["gpuwatch_series_dropped"] == 9
    assert of(found, "gpuwatch_rank_up") == 0
    assert not any(number == 7.0 for number in found.values())
    for name in ("evil", "hostname", "retries", "ooms", "capacity", "observation"):
        assert not any(name in key for key in found), name


def test_a_rank_with_too_many_series_is_cut_short(records: Path) -> None:
    writer = write_run(records, state=None)
    for number in range(SERIES_LIMIT):
        writer.values[writer.series("gpuwatch_guard_faults_total", probe=f"probe{number}")] = 1.0
    writer.close(State.CLEAN)
    found = scrape(exporter(records))
    kept = sum("guard_faults" in key for key in found)
    assert 0 < kept < SERIES_LIMIT
    assert kept + found["gpuwatch_series_dropped"] == SERIES_LIMIT


def test_final_values_are_served_once_and_then_a_tombstone(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = 'gpuwatch_rank_gone_timestamp_seconds{rank="0",run="train"}'
    with rank(records, steps=841) as process:
        exporting = exporter(records)
        assert of(scrape(exporting), "gpuwatch_rank_up") == 1
        process.kill()
        process.wait()
        final, soon = scrape(exporting), scrape(exporting)
        # when it died may be written down yet: until then nothing says so
        assert gone not in final and gone not in soon
        monkeypatch.setattr("gpuwatch.exporter.BURIAL_SECONDS", -1.0)
        scrape(exporting)
        after = scrape(exporting)
    assert of(final, "gpuwatch_rank_up") == 0
    assert of(final, "gpuwatch_batches_total") == 841
    assert {key: number for key, number in after.items() if "run=" in key} == {
        'gpuwatch_rank_up{rank="0",run="train"}': 0,
        'gpuwatch_rank_ended{rank="0",run="train"}': 0,
        'gpuwatch_rank_last_step{rank="0",run="train"}': 841,
        'gpuwatch_rank_exit_info{cause="killed",rank="0",run="train"}': 1,
        gone: pytest.approx(time.time() + 84.1, abs=30),  # 841 steps of 0.1 s after it was attached
    }
    assert after["gpuwatch_records"] == 1


@pytest.mark.parametrize(
    ("state", "cause"),
    [(State.CLEAN, "clean"), (State.EXCEPTION, "exception"), (State.DETACHED, "detached")],
)
def test_an_end_mark_tells_how_the_rank_ended(records: Path, state: State, cause: str) -> None:
    write_run(records, state=state)
    exporting = exporter(records)
    for found in (scrape(exporting), scrape(exporting)):
        assert of(found, "gpuwatch_rank_ended") == 1
        assert of(found, "gpuwatch_rank_exit_info", cause=cause) == 1


def test_a_rank_that_ended_over_an_hour_ago_is_not_mentioned(records: Path) -> None:
    old, recent = write_run(records, name="old"), write_run(records, name="recent")
    set_word(old.path, Word.ENDED, time.time_ns() - 3700 * 10**9)
    set_word(recent.path, Word.ENDED, time.time_ns() - 3500 * 10**9)
    found = scrape(exporter(records))
    assert of(found, "gpuwatch_rank_last_step", run="recent") == 200
    assert not any('run="old"' in key for key in found)
    assert found["gpuwatch_records"] == 2


def test_a_restart_supersedes_the_record_before_it(records: Path) -> None:
    write_run(records, steps=500)
    with rank(records, steps=120):
        found = scrape(exporter(records))
    assert of(found, "gpuwatch_rank_last_step") == 120
    assert of(found, "gpuwatch_rank_up") == 1


@pytest.mark.parametrize("anew", [{"restart": 1}, {"world_size": 2}], ids=["restarted", "resized"])
def test_a_start_with_fewer_ranks_supersedes_those_that_it_has_no_more(anew: dict[str, object], records: Path) -> None:
    first = {"restart": 0, "world_size": 3}
    for number in range(3):
        write_run(records, rank=number, identity=first, state=State.EXCEPTION, steps=60 + number)
    assert set(ups(scrape(exporter(records)))) == {"0", "1", "2"}
    with rank(records, rank=0, identity={**first, **anew}), rank(records, rank=1, identity={**first, **anew}):
        assert ups(scrape(exporter(records))) == {"0": 1, "1": 1}


def test_a_start_that_numbers_its_ranks_anew_supersedes_the_one_before(records: Path) -> None:
    first = {"restart": 0, "world_size": 4, "node": "here"}
    for number in range(2):
        write_run(records, rank=number, identity={**first, "local_rank": number}, state=State.EXCEPTION)
    other = {**first, "local_rank": 0, "node": "there"}  # one directory, two nodes
    write_run(records, rank=3, identity=other, state=State.EXCEPTION)
    with rank(records, rank=2, identity={**first, "local_rank": 0}):
        assert ups(scrape(exporter(records))) == {"1": 0, "2": 1, "3": 0}


def ups(found: dict[str, float]) -> dict[str, float]:
    """Which ranks are told of, and whether they live."""
    return {number: up for number in "0123" if (up := of(found, "gpuwatch_rank_up", rank=number)) is not None}


def test_a_silent_rank_is_told_with_the_cores_that_it_keeps_busy(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = exporter(records)
    with rank(records, values={"gpuwatch_rank_busy_cores": 12.0}):
        assert of(scrape(told), "gpuwatch_rank_busy_cores") is None, "not by the record"
        monkeypatch.setattr(told._busyness, "cores", lambda head, gpus: 0.75)
        assert of(scrape(told), "gpuwatch_rank_busy_cores") == 0.75


def test_runs_whose_names_look_alike_as_labels_are_not_published_twice(records: Path) -> None:
    write_run(records, name="a\x01")
    write_run(records, name="a\x02")
    write_run(records, name="\ud800" + "x" * 5000)
    found = scrape(exporter(records))
    assert of(found, "gpuwatch_rank_up", run="a\ufffd") == 0
    assert all(len(key) < 1000 for key in found)


def test_files_that_are_no_records_are_counted_by_reason_and_cost_the_others_nothing(records: Path) -> None:
    good = write_run(records).path
    content = good.read_bytes()
    (records / "short.gpw").write_bytes(content[:1000])
    (records / "empty.gpw").write_bytes(b"")
    (records / "noise.gpw").write_bytes(bytes(RECORD_BYTES))
    (records / "future.gpw").write_bytes(content[:8] + struct.pack("=Q", 99) + content[16:])
    (records / "schema.gpw").write_bytes(content[:SCHEMA_AT] + b"[" * (RECORD_BYTES - SCHEMA_AT))
    (records / "link.gpw").symlink_to(good)
    (records / "folder.gpw").mkdir()
    os.mkfifo(records / "pipe.gpw")
    found = scrape(exporter(records))
    rejected = {key: number for key, number in found.items() if "records_rejected" in key}
    assert rejected == {
        'gpuwatch_records_rejected{reason="size"}': 2,
        'gpuwatch_records_rejected{reason="magic"}': 1,
        'gpuwatch_records_rejected{reason="version"}': 1,
        'gpuwatch_records_rejected{reason="schema"}': 1,
        'gpuwatch_records_rejected{reason="type"}': 3,
    }
    assert found["gpuwatch_records"] == 1
    assert of(found, "gpuwatch_steps_total") == 200


@pytest.mark.parametrize(
    "schema",
    [
        b'{"run": "x", "rank": Infinity}\n',
        b'{"run": "x", "rank": 1.5}\n',
        b'{"run": "x"}\n',
        b"7\n",
        b"",
        b'{"run": "x", "rank": 0}\n{"a": 1, "b": 2}\n',
        b'{"run": "x", "rank": 0}\n["a", [["b", "c"]]]\n',
        b'{"run": "x", "rank": 0}\n["a", 7]\n',
        b'{"run": "x", "rank": 0}\n7\n',
        b'{"run": "x", "rank": 0}\n\xff\n',
    ],
)
def test_a_hostile_schema_is_rejected(records: Path, schema: bytes) -> None:
    path = write_run(records).path
    with path.open("r+b") as file:
        file.seek(SCHEMA_AT)
        file.write(schema)
    set_word(path, Word.SCHEMA_USED, len(schema))
    found = scrape(exporter(records))
    assert found['gpuwatch_records_rejected{reason="schema"}'] == 1
    assert found["gpuwatch_records"] == 0


def test_no_damage_to_a_record_breaks_a_scrape_a_page_or_a_post_mortem(records: Path) -> None:
    observed = [("debug-anomaly", "train.py:3", "on", 1.0)]
    path = write_run(records, steps=300, observations=observed).path
    content = path.read_bytes()
    words = [0, 2**63, 2**64 - 1, *struct.unpack("=3Q", struct.pack("=3d", math.inf, math.nan, -1e300))]
    chance = random.Random(7)
    accepted = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 3, 30, 300))):
            at = 8 * chance.choice((chance.randrange(2, 16), chance.randrange(RECORD_BYTES // 8)))
            damaged[at : at + 8] = struct.pack("=Q", chance.choice((*words, chance.getrandbits(64))))
        path.write_bytes(damaged)
        scrape(exporter(records))
        page(records, Sampler(no_gpus))
        try:
            snapshot = read(path)
        except RecordError:
            continue
        document(snapshot)
        accepted += 1
    assert accepted > 20


def test_a_directory_that_cannot_be_read_does_not_lose_the_gpus(records: Path) -> None:
    records.write_text("in the way")
    sampler = Sampler(lambda: [GpuReading(0, "GPU-1", "H100", "0:7", power_watts=655.0)], period_seconds=0.01)
    sampler.start()
    eventually(lambda: sampler.latest())
    found = scrape(exporter(records, sampler))
    sampler.stop()
    assert found['gpuwatch_source_up{source="records"}'] == 0
    assert found['gpuwatch_source_up{source="nvml"}'] == 1
    assert found['gpuwatch_gpu_power_watts{gpu="0",uuid="GPU-1"}'] == 655
    assert found['gpuwatch_gpu_info{gpu="0",name="H100",pci_bus_id="0:7",uuid="GPU-1"}'] == 1
    assert [key for key in found if "gpuwatch_gpu" in key and "655" not in key and "info" not in key] == [
        'gpuwatch_gpu_power_watts{gpu="0",uuid="GPU-1"}'
    ]


def test_without_nvml_the_records_are_published_and_the_source_is_down(records: Path) -> None:
    write_run(records)
    found = scrape(exporter(records))
    assert found['gpuwatch_source_up{source="nvml"}'] == 0
    assert found['gpuwatch_source_up{source="records"}'] == 1
    assert found['gpuwatch_source_last_collect_timestamp_seconds{source="records"}'] == pytest.approx(
        time.time(), abs=5
    )
    assert 'gpuwatch_source_last_collect_timestamp_seconds{source="nvml"}' not in found
    assert of(found, "gpuwatch_steps_total") == 200


def test_an_empty_or_missing_directory_is_no_error(records: Path) -> None:
    found = scrape(exporter(records))
    assert found["gpuwatch_records"] == 0
    assert found['gpuwatch_source_up{source="records"}'] == 1


def test_what_is_not_published_is_read_by_no_alert_and_no_panel() -> None:
    root = Path(__file__).resolve().parent.parent
    read_by = [*root.glob("alerts/*.rules.yaml"), *root.glob("dashboards/json/*.json")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in read_by)))
    assert not UNPUBLISHED & words


def test_what_is_not_published_is_left_out_without_a_word(records: Path) -> None:
    writer = write_run(records, state=None)
    for name in UNPUBLISHED:
        labels = dict.fromkeys(METRICS[name].labels, "0.5")
        writer.values[writer.series(name, **labels)] = 7.0
    writer.close(State.CLEAN)
    text = exporter(records).text()
    assert not any(name in text for name in UNPUBLISHED)
    assert "gpuwatch_series_dropped 0.0\n" in text


def test_many_ranks_are_worked_out_in_turns_and_each_at_its_first_scrape(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "leased", lambda file: True)
    monkeypatch.setattr(exporting, "WORK_SECONDS", 0.0)
    writers = [write_run(records, rank=number, state=None) for number in range(8)]
    exporter_of_all = exporter(records)

    def ratio() -> list[float | None]:
        found = scrape(exporter_of_all)
        return [of(found, "gpuwatch_window_jitter_ratio", rank=str(number)) for number in range(8)]

    first = ratio()
    assert None not in first
    for writer in writers:
        writer.step_row(*row(201, 30.0, {"data": 9.0}))
    changed = [[now != before for now, before in zip(ratio(), first, strict=True)] for _ in range(4)]
    assert [sum(each) for each in changed] == [2, 4, 6, 8]
