from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch import service
from gpuwatch.expr import series_key
from gpuwatch.page import POLICY
from tests.recorded import write_run
from tests.serving import Daemon, daemon, environment, eventually, rank, series, serve

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


def refused(process: subprocess.Popen[str]) -> str:
    """What a daemon that cannot serve says: one line, with status 2."""
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2, errors
    assert errors.count("\n") == 1, errors
    return errors


# -- pages -------------------------------------------------------------------------------------------------------------


def test_the_routes_answer(served: Daemon) -> None:
    assert served.get("/-/healthy").text == "healthy\n"
    assert served.get("/-/ready").text == "ready\n"
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


def test_a_silent_connection_does_not_hold_up_a_scrape(served: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(20)]
        half = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        half.sendall(b"GET /metr")
        began = time.monotonic()
        assert served.get("/metrics").status == 200
        assert time.monotonic() - began < 2
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
        assert 2 < time.monotonic() - began < 9
        began = time.monotonic()
        assert not any("gpuwatch_gpu" in key for key in served.scrape())
        assert time.monotonic() - began < 1
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


# -- one daemon per directory ------------------------------------------------------------------------------------------


def test_the_file_says_where_a_daemon_serves_as_long_as_it_lives(records: Path) -> None:
    assert service.running(records) is None
    with daemon(records) as served:
        assert service.running(records) == served.url
        content = json.loads((records / "daemon.json").read_text())
        assert content == {"pid": served.process.pid, "port": served.port, "url": served.url}
        served.process.kill()
        served.process.wait()
    assert (records / "daemon.json").exists()
    assert service.running(records) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"url": 7}', b'{"url": "file:///etc"}', b"[" * 5000])
def test_a_strange_file_is_no_daemon(records: Path, content: bytes) -> None:
    records.mkdir()
    file = service.hold(records)
    os.pwrite(file, content, 0)
    asked = subprocess.run(
        [sys.executable, "-c", "import sys; from pathlib import Path; from gpuwatch import service;"
         "print(service.running(Path(sys.argv[1])))", str(records)],
        env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    os.close(file)
    assert asked.stdout == "None\n"


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


def test_a_directory_that_is_none_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert refused(serve(path)).startswith(f"gpuwatch: cannot serve {path}: ")


def test_a_link_in_the_place_of_the_lock_is_not_followed(records: Path, tmp_path: Path) -> None:
    records.mkdir()
    (tmp_path / "precious").write_text("precious")
    (records / "daemon.json").symlink_to(tmp_path / "precious")
    assert "cannot serve" in refused(serve(records))
    assert (tmp_path / "precious").read_text() == "precious"


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(records: Path, number: signal.Signals) -> None:
    with daemon(records) as served:
        served.process.send_signal(number)
        _, errors = served.process.communicate(timeout=10)
        assert (served.process.returncode, errors) == (0, "")


def test_it_ends_by_itself_when_no_rank_lives(records: Path) -> None:
    with daemon(records, exit_when_idle=1.0) as served:
        with rank(records):
            time.sleep(2.5)
            assert served.process.poll() is None
        _, errors = served.process.communicate(timeout=10)
        assert served.process.returncode == 0
        assert "no rank has lived for 1 s: ending" in errors


# -- started by a training process -------------------------------------------------------------------------------------


@pytest.fixture
def ended(records: Path) -> Iterator[None]:
    """Ends the daemon that a test left to itself."""
    yield
    with contextlib.suppress(OSError, ValueError):
        os.kill(json.loads((records / "daemon.json").read_text())["pid"], signal.SIGTERM)
    eventually(lambda: service.running(records) is None)


def start_in(records: Path, cwd: Path, after: str = "", environ: dict[str, str] | None = None) -> str:
    code = textwrap.dedent("""
        import os, signal, sys, threading, time
        from pathlib import Path
        from gpuwatch import service
        records = Path(sys.argv[1])
        before = threading.active_count(), [signal.getsignal(number) for number in signal.valid_signals()]
        service.start(records)
        assert before == (threading.active_count(), [signal.getsignal(number) for number in signal.valid_signals()])
        try:
            print("a child is left", os.waitpid(-1, os.WNOHANG))
        except ChildProcessError:
            print("no child")
        """)
    command = [sys.executable, "-W", "error", "-c", code + textwrap.dedent(after), str(records)]
    # The pipes end only when no process holds them any more, the daemon neither.
    done = subprocess.run(
        command, cwd=cwd, env=environ or environment(), capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.usefixtures("ended")
def test_a_started_daemon_is_no_child_and_outlives_its_starter(records: Path, tmp_path: Path) -> None:
    records.mkdir()
    assert start_in(records, tmp_path) == "no child\n"
    eventually(lambda: service.running(records))
    pid = json.loads((records / "daemon.json").read_text())["pid"]
    assert f"gpuwatch: serving {service.running(records)}" in (records / "daemon.log").read_text()
    assert (records / "daemon.log").stat().st_mode & 0o777 == 0o600
    assert os.getsid(pid) != os.getsid(0)
    assert Path(f"/proc/{pid}/cwd").resolve() == Path("/")
    for file in ("0", "1"):
        assert Path(f"/proc/{pid}/fd/{file}").resolve() == Path("/dev/null")


@pytest.mark.usefixtures("ended")
def test_odd_modules_and_relative_paths_of_the_starter_do_no_harm(records: Path, tmp_path: Path) -> None:
    records.mkdir()
    odd = tmp_path / "odd"
    odd.mkdir()
    for name in ("json", "socket", "prometheus_client", "wsgiref", "gpuwatch"):
        (odd / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    relative = environment(PYTHONPATH=f"{os.path.relpath(Path(service.__file__).parent.parent, odd)}{os.pathsep}")
    code = "import os, sys; sys.path = [path for path in sys.path if path not in ('', os.getcwd())]\n"
    started = subprocess.run(
        [sys.executable, "-c", code + "from pathlib import Path; from gpuwatch import service;"
         "service.start(Path(os.path.relpath(sys.argv[1])))", str(records)],
        cwd=odd, env=relative, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (started.returncode, started.stderr) == (0, "")
    eventually(lambda: service.running(records))


@pytest.mark.usefixtures("ended")
def test_a_file_that_children_inherit_is_not_held_by_the_daemon(records: Path, tmp_path: Path) -> None:
    records.mkdir()
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    service.start(records)
    os.close(writing)
    eventually(lambda: service.running(records))
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b""  # its end: nobody else could write
    os.close(reading)


@pytest.mark.usefixtures("ended")
def test_eight_ranks_that_start_one_at_once_leave_one(records: Path) -> None:
    records.mkdir()
    code = "import sys; from pathlib import Path; from gpuwatch import service; service.start(Path(sys.argv[1]))"
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(records)], env=environment()) for _ in range(8)]
    assert [process.wait() for process in ranks] == [0] * 8
    eventually(lambda: (records / "daemon.log").read_text().count("\n") == 8, seconds=40)
    lines = (records / "daemon.log").read_text().splitlines()
    assert sum("serving http" in line for line in lines) == 1
    assert sum("is served already" in line for line in lines) == 7
    assert service.running(records) is not None


@pytest.mark.usefixtures("ended")
def test_a_log_that_cannot_be_written_does_not_keep_a_daemon_from_starting(records: Path, tmp_path: Path) -> None:
    records.mkdir()
    (records / "daemon.log").mkdir()
    assert start_in(records, tmp_path) == "no child\n"
    eventually(lambda: service.running(records))


@pytest.mark.usefixtures("ended")
def test_starting_with_children_ignored_does_not_hang(records: Path) -> None:
    records.mkdir()
    command = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); from pathlib import Path;"
    command += "from gpuwatch import service; service.start(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", command, str(records)], env=environment(), check=True, timeout=30)
    eventually(lambda: service.running(records))
