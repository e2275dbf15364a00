from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch import service
from tests.serving import daemon, environment, eventually, refused, serve


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


def test_a_link_in_the_place_of_the_lock_is_not_followed(records: Path, tmp_path: Path) -> None:
    records.mkdir()
    (tmp_path / "precious").write_text("precious")
    (records / "daemon.json").symlink_to(tmp_path / "precious")
    assert "cannot serve" in refused(serve(records))
    assert (tmp_path / "precious").read_text() == "precious"


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
        command, cwd=cwd, env=environ or environment(), capture_output=True, text=True, check=False, timeout=120
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
        cwd=odd, env=relative, capture_output=True, text=True, check=False, timeout=120,
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
    eventually(lambda: (records / "daemon.log").read_text().count("\n") == 8)
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
    subprocess.run([sys.executable, "-c", command, str(records)], env=environment(), check=True, timeout=120)
    eventually(lambda: service.running(records))
