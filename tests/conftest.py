"""Shared fixtures."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh directory of records, named to everything that asks for one; no daemon is started."""
    directory = tmp_path / "records"
    monkeypatch.setenv("GPUWATCH_DIR", str(directory))
    monkeypatch.setenv("GPUWATCH_DAEMON", "0")
    monkeypatch.delenv("GPUWATCH_DISABLE", raising=False)
    monkeypatch.delenv("GPUWATCH_QUIET", raising=False)
    return directory


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
