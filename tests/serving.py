"""A daemon and ranks as processes of their own, and what a scrape says, for tests of the daemon's parts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gpuwatch.expr import series_key

ROOT = Path(__file__).resolve().parent.parent

_SERVE = """
import json, sys
from pathlib import Path
from gpuwatch.daemon import serve
options = json.loads(sys.argv[3])
if "web_config" in options:
    options["web_config"] = Path(options["web_config"])
sys.exit(serve(sys.argv[1], Path(sys.argv[2]), **options))
"""

_RANK = """
import json, sys
from pathlib import Path
from gpuwatch.layout import State
from tests.recorded import write_run
writer = write_run(Path(sys.argv[1]), state=None, **json.loads(sys.argv[2]))
print(writer.path, flush=True)
if sys.stdin.readline():
    writer.close(State.CLEAN)
"""


def environment(**more: str) -> dict[str, str]:
    """This process's, with the sources and the tests to import from."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()


@dataclass(frozen=True)
class Daemon:
    """A daemon that serves."""

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rstrip("/").rpartition(":")[2])

    def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        """Ask it for a page."""
        request = urllib.request.Request(self.url.rstrip("/") + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Reply(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as answer:
            with answer:
                return Reply(answer.code, dict(answer.headers), answer.read())

    def scrape(self) -> dict[str, float]:
        """Its metrics, by series key."""
        return series(self.get("/metrics").text)

    def stop(self) -> tuple[int, str]:
        """End it; its exit status and what it wrote on standard error after it began to serve."""
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def serve(
    directory: Path,
    listen: str = "127.0.0.1:0",
    environ: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    **options: object,
) -> subprocess.Popen[str]:
    """Start a daemon; warnings are errors in it. ``wrapper`` is a command that runs it."""
    command = [*wrapper, sys.executable, "-W", "error", "-c", _SERVE, listen, str(directory), json.dumps(options)]
    return subprocess.Popen(
        command, env=environ or environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def refused(process: subprocess.Popen[str]) -> str:
    """What a daemon that cannot serve says: one line, with status 2."""
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert errors.count("\n") == 1, errors
    return errors


@contextlib.contextmanager
def daemon(
    directory: Path,
    listen: str = "127.0.0.1:0",
    environ: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    **options: object,
) -> Iterator[Daemon]:
    """A daemon that serves the directory, ended with the block."""
    process = serve(directory, listen, environ, wrapper, **options)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(rf"gpuwatch: serving (https?://\S+/) for {re.escape(str(directory))}\n", line)
        assert found is not None, line + process.stderr.read()
        yield Daemon(process, found[1])
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def rank(directory: Path, **run: object) -> Iterator[subprocess.Popen[str]]:
    """A living rank: a process that holds a record (see :func:`recorded.write_run`), killed with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(directory), json.dumps(run)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip().endswith(".gpw")
        yield process
    finally:
        process.kill()
        process.communicate()


def series(text: str) -> dict[str, float]:
    """An exposition by series key; fails on a series that is there twice and on a number that is none."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = series_key(sample.name, sample.labels)
            assert key not in found, f"twice: {key}"
            assert abs(sample.value) < float("inf"), f"not a number: {key} {sample.value}"
            found[key] = sample.value
    return found


def eventually(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until it holds; a machine that others share may take its time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.02)
