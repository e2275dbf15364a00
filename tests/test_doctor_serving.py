"""``gpuwatch doctor`` on real daemons, on others' servers, and on none."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gpuwatch.doctor import serving
from gpuwatch.doctor.serving import daemon_checks, port_checks
from gpuwatch.version import __version__
from tests.doctoring import told
from tests.serving import daemon, environment

# -- the daemon and its port ------------------------------------------------------------------------------------------


@pytest.fixture
def lonely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that no daemon serves, in an environment that lets a run start one."""
    monkeypatch.delenv("GPUWATCH_DAEMON", raising=False)
    return tmp_path


def test_no_daemon_is_well_unless_a_run_may_not_start_one(lonely: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(daemon_checks(lonely)) == "ok none serves the directory; the first run starts one"
    monkeypatch.setenv("GPUWATCH_DAEMON", "0")
    assert re.match("warn none serves the directory, and GPUWATCH_DAEMON forbids", told(daemon_checks(lonely)))


def test_a_daemon_that_answers_is_ours_and_so_is_its_port(lonely: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    with daemon(lonely) as node:
        assert told(daemon_checks(lonely)) == f"ok {node.url} answers, version {__version__}"
        assert told(port_checks(lonely, node.port)) == f"ok {node.port} is this directory's daemon's"
        other = told(port_checks(lonely / "elsewhere", node.port))
        assert other.startswith("warn ") and "another gpuwatch daemon's" in other
        monkeypatch.setattr(serving, "__version__", "9.9")
        assert re.match("warn .* is of version .*, this is 9.9", told(daemon_checks(lonely)))


_HOLDING = """
import sys, time
from pathlib import Path
from gpuwatch import service
service.announce(service.hold(Path(sys.argv[1])), int(sys.argv[2]), f"http://127.0.0.1:{sys.argv[2]}/")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(directory: Path, port: int) -> Iterator[None]:
    """A process that holds a directory as a daemon does, and says that it serves on this port."""
    command = [sys.executable, "-c", _HOLDING, str(directory), str(port)]
    with subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def answering(page: bytes) -> Iterator[int]:
    """Somebody's web server with one page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_a_daemon_that_does_not_answer_fails(lonely: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    with held(lonely, port):
        assert re.match("fail one holds the directory but does not answer at", told(daemon_checks(lonely)))


def test_a_daemon_that_cannot_read_the_records_fails(lonely: Path) -> None:
    page = f'gpuwatch_build_info{{version="{__version__}"}} 1.0\ngpuwatch_source_up{{source="records"}} 0.0\n'
    with answering(page.encode()) as port, held(lonely, port):
        assert re.match("fail .* cannot read the records", told(daemon_checks(lonely)))


def test_a_port_is_free_or_somebody_elses(lonely: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = int(silent.getsockname()[1])
        assert told(port_checks(lonely, port)) == f"warn {port} is taken by somebody else's process"
    assert told(port_checks(lonely, port)) == f"ok {port} is free"
    with answering(b"\xff hello") as port:
        assert told(port_checks(lonely, port)).startswith("warn ")
