from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch import service
from gpuwatch.expr import series_key
from gpuwatch.web import POLICY
from tests.recorded import write_run
from tests.serving import Daemon, daemon, environment, eventually, rank, refused, series, serve

needs_stub = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")


@pytest.fixture
def served(records: Path) -> Iterator[Daemon]:
    with daemon(records) as running:
        yield running


@pytest.fixture
def nvidia(nvml_stub: Path, gpus: Path) -> dict[str, str]:
    """The environment of a machine with two simulated GPUs."""
    return environment(LD_LIBRARY_PATH=str(nvml_stub.parent), NVMLSTUB_CONF=str(gpus))


def change(gpus: Path, *lines: str) -> None:
    with gpus.open("a") as file:
        file.write("\n".join(lines) + "\n")


# -- pages -------------------------------------------------------------------------------------------------------------


def test_the_routes_answer(served: Daemon) -> None:
    assert served.get("/-/healthy").text == "healthy\n"
    assert served.get("/-/ready").text.startswith("ready\nrecords: 0, with all else 2 files of ")
    assert served.get("/nothing").status == 404
    page = served.get("/")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.headers["Content-Security-Policy"] == POLICY
    assert "default-src 'none'" in POLICY
    assert "script" not in POLICY
    assert "No run yet" in page.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/-/healthy"])
def test_only_reading_is_allowed(served: Daemon, method: str, path: str) -> None:
    reply = served.get(path, method)
    assert reply.status == 405
    assert reply.headers["Allow"] == "GET, HEAD"


def test_a_head_is_the_headers_alone_and_scrapes_nothing(records: Path, served: Daemon) -> None:
    write_run(records)
    for path in ("/", "/metrics", "/-/ready"):
        reply = served.get(path, "HEAD")
        assert (reply.status, reply.body) == (200, b"")
    assert 'gpuwatch_batches_total{rank="0",run="train"}' in served.scrape()


def test_a_scrape_speaks_openmetrics_and_gzip_when_asked(served: Daemon) -> None:
    asked = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}
    reply = served.get("/metrics", **asked)
    assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
    assert reply.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(reply.body).endswith(b"# EOF\n")
    for header, gzipped in (
        ("deflate, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("identity", False),
        ("x-gzipped", False),
    ):
        assert ("Content-Encoding" in served.get("/metrics", **{"Accept-Encoding": header}).headers) is gzipped


def test_a_silent_connection_does_not_hold_up_a_scrape(served: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(20)]
        half = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        half.sendall(b"GET /metr")
        began = time.monotonic()
        assert served.get("/metrics").status == 200
        assert time.monotonic() - began < 4, "they are given up after five seconds"
        silent[0].settimeout(15)
        assert silent[0].recv(1) == b""  # given up by the server
    code, errors = served.stop()
    assert (code, errors) == (0, "")


# -- metrics -----------------------------------------------------------------------------------------------------------


@pytest.mark.debian
@needs_stub
@needs_promtool
def test_promtool_accepts_a_live_scrape_of_ranks_and_gpus(records: Path, nvidia: dict[str, str]) -> None:
    observed = [("debug-anomaly", "train.py:31", "on", 120.0)]
    write_run(records, name="gone", observations=observed)
    with (
        rank(records, rank=0, world_size=2, observations=observed),
        rank(records, rank=1, world_size=2),
        daemon(records, environ=nvidia) as served,
    ):
        eventually(lambda: served.scrape()['gpuwatch_source_up{source="nvml"}'] == 1)
        text = served.get("/metrics").text
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    found = series(text)
    assert sum(key.startswith("gpuwatch_rank_up") for key in found) == 3
    gpu = {"gpu": "0", "uuid": "GPU-00000000-0000-0000-0000-0000000000a0"}
    for name, number in (
        ("utilization_ratio", 0.97),
        ("memory_used_bytes", 80530636800),
        ("power_watts", 655),
        ("sm_clock_hertz", 1755e6),
        ("processes", 2),
        ("thermal_throttle", 0),
        ("energy_joules_total", 123456.789),
    ):
        assert found[series_key(f"gpuwatch_gpu_{name}", gpu)] == pytest.approx(number), name
    assert found[series_key("gpuwatch_gpu_clock_event_reason", {**gpu, "reason": "sw_power_cap"})] == 1
    assert not any("4294967295" in key or "18446744073709551615" in key for key in found)


@pytest.mark.debian
@needs_stub
def test_what_the_hardware_does_shows_within_seconds(records: Path, nvidia: dict[str, str], gpus: Path) -> None:
    throttle = 'gpuwatch_gpu_thermal_throttle{gpu="0",uuid="GPU-00000000-0000-0000-0000-0000000000a0"}'
    power = throttle.replace("thermal_throttle", "power_watts")
    with daemon(records, environ=nvidia) as served:
        eventually(lambda: served.scrape().get(throttle) == 0)
        change(gpus, "gpu0.reasons=0x40", "gpu0.err.nvmlDeviceGetPowerUsage=3")
        eventually(lambda: served.scrape()[throttle] == 1)
        assert power not in served.scrape()
        change(gpus, "gpu0.err.nvmlDeviceGetHandleByIndex_v2=15")
        eventually(lambda: throttle not in served.scrape())
        assert any('gpu="1"' in key for key in served.scrape())
        change(gpus, "err.nvmlDeviceGetCount_v2=1", "err.nvmlInitWithFlags=9")
        eventually(lambda: served.scrape()['gpuwatch_source_up{source="nvml"}'] == 0)
        assert not any("gpuwatch_gpu" in key for key in served.scrape())
        eventually(lambda: "the NVIDIA driver is not loaded" in served.get("/").text)
        change(gpus, "err.nvmlDeviceGetCount_v2=0", "err.nvmlInitWithFlags=0")
        eventually(lambda: served.scrape()['gpuwatch_source_up{source="nvml"}'] == 1)


@pytest.mark.debian
@needs_stub
def test_a_stuck_driver_does_not_hold_up_a_scrape(records: Path, nvidia: dict[str, str], gpus: Path) -> None:
    with daemon(records, environ=nvidia) as served:
        eventually(lambda: served.scrape()['gpuwatch_source_up{source="nvml"}'] == 1)
        change(gpus, "delay.nvmlDeviceGetPowerUsage=60000")
        began = time.monotonic()
        eventually(lambda: served.scrape()['gpuwatch_source_up{source="nvml"}'] == 0)
        assert 2 < time.monotonic() - began < 40, "the driver takes a minute"
        began = time.monotonic()
        assert not any("gpuwatch_gpu" in key for key in served.scrape())
        assert time.monotonic() - began < 10
        assert "the driver may be stuck" in served.get("/").text
        assert served.stop() == (0, "")


def test_a_killed_rank_is_down_with_its_exact_last_step_then_only_a_tombstone(records: Path, served: Daemon) -> None:
    with rank(records, steps=841) as process:
        assert served.scrape()['gpuwatch_rank_up{rank="0",run="train"}'] == 1
        process.kill()
        process.wait()
        final, after = served.scrape(), served.scrape()
    for found in (final, after):
        assert found['gpuwatch_rank_up{rank="0",run="train"}'] == 0
        assert found['gpuwatch_rank_last_step{rank="0",run="train"}'] == 841
        assert found['gpuwatch_rank_exit_info{cause="killed",rank="0",run="train"}'] == 1
    assert final['gpuwatch_batches_total{rank="0",run="train"}'] == 841
    assert 'gpuwatch_batches_total{rank="0",run="train"}' not in after


# -- post-mortems ------------------------------------------------------------------------------------------------------


def test_a_rank_that_died_without_an_end_mark_gets_one_post_mortem(records: Path) -> None:
    write_run(records, name="ended")
    observed = [("debug-anomaly", "train.py:31", "on", 120.0)]
    with daemon(records) as served:
        with rank(records, steps=841, observations=observed) as process:
            pid = process.pid
        eventually(lambda: list(records.glob("post-mortem/*.json")))
        code, errors = served.stop()
    [written] = records.glob("post-mortem/*")
    assert code == 0
    assert errors == f"gpuwatch: rank 0 of 'train' died at step 841: {written}\n"
    assert written.stat().st_mode & 0o777 == 0o600
    [record] = records.glob("train*.gpw")
    assert written.stem == record.stem
    content = json.loads(written.read_text())
    known = {"run": "train", "rank": 0, "pid": pid, "cause": "killed", "last_step": 841, "last_phase": "other"}
    assert {name: content[name] for name in known} == known
    assert {"run-dead", "debug-anomaly"} <= {finding["rule"] for finding in content["findings"]}
    before = written.stat().st_mtime_ns
    with daemon(records) as served:
        time.sleep(0.3)
        assert served.stop() == (0, "")
    assert written.stat().st_mtime_ns == before


def test_what_is_in_the_way_of_post_mortems_is_said_once_and_the_daemon_goes_on(records: Path) -> None:
    records.mkdir()
    (records / "post-mortem").write_text("in the way")
    with daemon(records) as served:
        for number in range(2):
            with rank(records, name=f"run{number}"):
                pass
        eventually(lambda: served.scrape()["gpuwatch_records"] == 2)
        time.sleep(1.2)
        assert served.get("/-/healthy").status == 200
        code, errors = served.stop()
    assert code == 0
    assert errors == f"gpuwatch: cannot write post-mortems into {records}: File exists\n"


def test_the_place_of_post_mortems_is_taken_before_somebody_else_can(records: Path, served: Daemon) -> None:
    assert (records / "post-mortem").stat().st_mode & 0o7777 == 0o700


# -- one daemon per directory ------------------------------------------------------------------------------------------


def test_a_second_daemon_for_the_directory_says_where_the_first_is(records: Path, served: Daemon) -> None:
    assert refused(serve(records)) == f"gpuwatch: {records} is served already at {served.url}\n"
    assert served.get("/-/healthy").status == 200
    assert service.running(records) == served.url


def test_a_busy_port_is_one_clear_line(tmp_path: Path, served: Daemon) -> None:
    line = refused(serve(tmp_path / "other", f"127.0.0.1:{served.port}"))
    assert line.startswith(f"gpuwatch: cannot listen on 127.0.0.1:{served.port}: Address already in use")


def test_a_busy_port_can_be_given_up_for_a_free_one(tmp_path: Path, served: Daemon) -> None:
    with daemon(tmp_path / "other", f"127.0.0.1:{served.port}", any_port=True) as other:
        assert other.port != served.port
        assert other.get("/-/ready").status == 200


@pytest.mark.parametrize("listen", ["", "9847", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:x", ":9847"])
def test_an_address_that_is_none_is_one_clear_line(records: Path, listen: str) -> None:
    assert "expected HOST:PORT" in refused(serve(records, listen))


def test_a_host_that_is_not_here_is_one_clear_line(records: Path) -> None:
    assert "cannot listen on 203.0.113.7:0" in refused(serve(records, "203.0.113.7:0"))
    assert "it is no name of a host" in refused(serve(records, f"{'a' * 300}:0"))


def test_a_directory_that_is_none_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert refused(serve(path)).startswith(f"gpuwatch: cannot serve {path}: ")


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(records: Path, number: signal.Signals) -> None:
    with daemon(records) as served:
        served.process.send_signal(number)
        _, errors = served.process.communicate(timeout=60)
        assert (served.process.returncode, errors) == (0, "")


def test_it_ends_by_itself_when_no_rank_lives(records: Path) -> None:
    with rank(records) as living, daemon(records, exit_when_idle=1.0) as served:
        time.sleep(2.5)
        assert served.process.poll() is None
        living.kill()
        _, errors = served.process.communicate(timeout=60)
        assert served.process.returncode == 0
        assert "no rank has lived for 1 s: ending" in errors
