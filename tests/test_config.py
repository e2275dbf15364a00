"""Where records go, whatever the environment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwatch import config


def test_a_home_that_nobody_has_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_writable_directory", lambda path: False)
    assert config.record_directory({"GPUWATCH_DIR": "/a/b"}) == Path("/a/b")
    assert config.record_directory({"GPUWATCH_DIR": "~nobody-has-this-name/x"}) == Path("/nobody-has-this-name/x")

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert config.record_directory({}) == Path("/.local/state/gpuwatch")
    assert config.record_directory({"GPUWATCH_DIR": "~/runs"}) == Path("/runs")
