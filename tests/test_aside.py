"""Rare work in a process of its own: what it answers, and what becomes of one that fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwatch import aside
from gpuwatch.nvml import GpuReading, NvmlUnavailable
from gpuwatch.past import FEWEST_SAMPLES
from gpuwatch.sampler import Sampler
from tests.serving import environment, eventually

ECHO = """
import sys
from gpuwatch import aside
print(aside.begin(), sys.argv[1:])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module ``errand`` that can be asked."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "errand.py"


def test_a_module_is_told_and_answers(module: Path) -> None:
    module.write_text(ECHO)
    told = [1, None, {"text": "a\nb \udc80"}, "x" * 1_000_000]
    answer = aside.ask("errand", ["one", "two"], told)
    assert answer.decode() == f"{told} ['one', 'two']\n"


LONG = f"from gpuwatch import aside; aside.begin(); print('x' * {aside.LONGEST_ANSWER + (1 << 20)})"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit(3)", "errand failed: exit status 3"),
        ("import os; os.abort()", "errand failed: signal 6"),
        ("", "errand failed: exit status 0"),
        (LONG, "errand failed: signal 9"),
        ("from gpuwatch import aside; aside.begin(); bytearray(1 << 30)", "errand failed: exit status 1"),
    ],
)
def test_one_that_fails_is_said_in_a_line(
    module: Path, program: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    module.write_text(program)
    with pytest.raises(aside.AsideError, match=reason):
        aside.ask("errand", [], ["x" * 1_000_000])
    capfd.readouterr()


def test_one_that_never_ends_is_ended(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(aside, "SECONDS", 0.2)
    with pytest.raises(aside.AsideError, match=r"errand took more than 0\.2 s"):
        aside.ask("errand", [], [])


def test_where_children_are_ignored_the_answer_alone_counts(module: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        module.write_text(ECHO)
        assert aside.ask("errand", [], [1]) == b"[1] []\n"
        module.write_text("raise SystemExit(3)")
        with pytest.raises(aside.AsideError):
            aside.ask("errand", [], [1])
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("python", ["", "/nowhere/python"])
def test_without_a_python_to_start_it_says_so(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(aside.NotStarted):
        aside.ask("errand", [], [])


def test_what_a_sampler_knows_is_the_same_in_another_process() -> None:
    reading = GpuReading(0, "GPU-1", "H100", power_watts=600.0, processes=((7, 1 << 30),), xids=((79, 1),))
    sampler = Sampler(lambda: [reading], period_seconds=0.001)
    sampler.start()
    eventually(lambda: len(sampler.history(reading).get("gpuwatch_gpu_power_watts", ())) >= FEWEST_SAMPLES)
    sampler.stop()
    sampler._thread.join()
    again = Sampler.of([*map(json_of, sampler.told())])
    assert again.latest() == sampler.latest()
    assert again.history(reading) == sampler.history(reading)


def test_a_sampler_without_gpus_tells_why() -> None:
    def read() -> list[GpuReading]:
        raise NvmlUnavailable("no GPU telemetry: this is a test")

    sampler = Sampler(read)
    sampler.start()
    eventually(lambda: "test" in str(sampler.unavailable()))
    sampler.stop()
    again = Sampler.of(sampler.told())
    assert again.latest() is None
    assert again.unavailable() == "no GPU telemetry: this is a test"


def test_the_daemon_loads_no_rules() -> None:
    loaded = "import sys, gpuwatch.cli, gpuwatch.daemon, gpuwatch.nvml; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", loaded], env=environment(), text=True).split()
    assert "gpuwatch.exporter" in modules
    heavy = ("gpuwatch.rulebook", "gpuwatch.advisor", "gpuwatch.report.document", "gpuwatch.page", "ssl", "pynvml")
    assert not {*heavy, "http.server", "subprocess", "prometheus_client", "rich"} & set(modules)


def json_of(told: object) -> object:
    return json.loads(json.dumps(told))
