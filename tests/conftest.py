"""Shared fixtures."""

from __future__ import annotations

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
