"""Shared fixtures."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.programs import Programs


def pytest_configure() -> None:
    """In the background of a shell SIGINT is ignored, after nohup SIGHUP; the tests' programs are to know them."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is run again has new fixtures, those of its module too: the same run would be judged the same."""
    if isinstance(item, pytest.Function) and getattr(item, "execution_count", 1) > 1:
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            for definition in definitions:
                if definition.scope != "function" and definition.baseid.startswith("tests"):
                    definition.finish(item._request)  # type: ignore[arg-type]


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh directory of records, named to everything that asks for one; no daemon is started."""
    directory = tmp_path / "records"
    monkeypatch.setenv("GPUWATCH_DIR", str(directory))
    monkeypatch.setenv("GPUWATCH_DAEMON", "0")
    monkeypatch.delenv("GPUWATCH_DISABLE", raising=False)
    monkeypatch.delenv("GPUWATCH_QUIET", raising=False)
    return directory


class Faults(logging.Handler):
    """Collects what the guard says of a probe's first fault."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the tracebacks; other warnings are for the user."""
        if record.exc_info:
            self.tracebacks.append(logging.Formatter().format(record))


@pytest.fixture(autouse=True)
def no_swallowed_fault(request: pytest.FixtureRequest) -> Iterator[None]:
    """The guard keeps faults of the hooks from the user; here every one fails the test, unless it is expected."""
    faults = Faults()
    logging.getLogger("gpuwatch").addHandler(faults)
    yield
    if "gpuwatch_hooks.attach" in sys.modules:  # a test without torch stays one
        from gpuwatch.layout import State
        from gpuwatch_hooks import attach, guard

        if attach._active is not None:  # a run that the test left attached
            attach.end(attach._active, State.DETACHED)
            attach._active = None
        guard.reset()
    logging.getLogger("gpuwatch").removeHandler(faults)
    if request.node.get_closest_marker("faults_expected") is None:
        assert not faults.tracebacks, "the guard swallowed:\n" + "\n".join(faults.tracebacks)


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for libnvidia-ml.so.1, built from tests/nvmlstub."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(__file__).parent / "nvmlstub" / "nvmlstub.c"
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    flags = ["-std=c11", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """The state of two simulated GPUs, in a file to append ``key=value`` lines to (see tests/nvmlstub)."""
    return Path(shutil.copy(Path(__file__).parent / "nvmlstub" / "two_h100.conf", tmp_path / "gpus.conf"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where GPUWATCH_NO_SKIPS is set (CI), a test that needs a tool and was skipped has failed."""
    report = yield
    skipped = report.skipped and item.get_closest_marker("debian") is not None
    if skipped and os.environ.get("GPUWATCH_NO_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: install what it needs ({report.longrepr})"
    return report


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Runs whole programs that use torch, and gives back how they ended."""
    running = Programs(tmp_path_factory.mktemp("programs"))
    yield running
    running.stop()
