"""What ``gpuwatch doctor`` says, and a machine whose kernel says what a test wants, for its tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from gpuwatch.doctor.check import Check, Machine


def told(checks: Iterator[Check]) -> str:
    """The states and what was said, a line each; what is not well has something to do, what is well has not."""
    found = list(checks)
    assert found
    for check in found:
        assert bool(check.todo) is (check.state != "ok"), check
        assert (check.about + check.said + check.todo).isprintable()
    return "\n".join(f"{check.state} {check.said}" for check in found)


def machine(root: Path, files: Mapping[str, str] | None = None) -> Machine:
    """A machine whose kernel shows these files, by their path below proc, cgroups or dev."""
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "dev" / "shm").mkdir(parents=True, exist_ok=True)
    return Machine(root / "proc", root / "cgroups", root / "dev")
