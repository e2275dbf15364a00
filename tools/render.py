"""Write every generated file, or with ``--check`` name the stale ones.

Run it from anywhere as ``python tools/render.py`` where gpuwatch is installed for development, or as
``python -m tools.render`` in the repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dashboards.boards import BOARDS
from gpuwatch.render.alertmanager import alertmanager_config
from gpuwatch.render.alerts import alert_rules
from gpuwatch.render.kubernetes import prometheus_rule
from gpuwatch.render.promtool import promtool_tests
from gpuwatch.render.readme import with_table
from gpuwatch.render.ruleids import rule_ids
from gpuwatch.render.runbooks import runbook
from gpuwatch.rulebook import RULES

ROOT = Path(__file__).resolve().parent.parent
OWNED = ("alerts/runbooks/*.md", "dashboards/json/*.json")
"""Folders whose every file is generated: what is there and no longer rendered is stale."""


def generated(root: Path = ROOT) -> dict[str, str]:
    """Every generated file: its path below the repository and its text."""
    files = {
        "alerts/gpuwatch.rules.yaml": alert_rules(RULES),
        "alerts/gpuwatch.test.yaml": promtool_tests(RULES),
        "deploy/kubernetes/prometheusrule.yaml": prometheus_rule(RULES),
        "deploy/stack/alertmanager/alertmanager.yml": alertmanager_config(RULES),
        "gpuwatch/catalog/ruleids.py": rule_ids(RULES),
        **{f"dashboards/json/{name}.json": draw() for name, draw in BOARDS.items()},
        **{f"alerts/runbooks/{rule.id}.md": runbook(rule) for rule in RULES},
    }
    readme = root / "README.md"
    if readme.is_file():
        files["README.md"] = with_table(readme.read_text(encoding="utf-8"), RULES)
    return files


def stale(root: Path = ROOT) -> list[str]:
    """The generated files that differ from what would be written, are missing, or are left over."""
    files = generated(root)
    left_over = [
        path.relative_to(root).as_posix()
        for pattern in OWNED
        for path in root.glob(pattern)
        if path.relative_to(root).as_posix() not in files
    ]
    return sorted([path for path, text in files.items() if _read(root / path) != text] + left_over)


def write(root: Path = ROOT) -> list[str]:
    """Write what is stale, remove what is left over; returns their paths."""
    files, changed = generated(root), stale(root)
    for path in changed:
        if path in files:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(files[path], encoding="utf-8")
        else:
            (root / path).unlink()
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when every file is up to date (afterwards), 1 when ``--check`` found a stale one."""
    parser = argparse.ArgumentParser(prog="render.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    if parser.parse_args(arguments).check:
        found = stale()
        for path in found:
            print(f"stale: {path}; run `make render`")
        return 1 if found else 0
    for path in write():
        print(f"wrote {path}")
    return 0


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
