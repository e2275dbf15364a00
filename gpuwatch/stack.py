"""``gpuwatch stack DIR``: a directory with Prometheus, Alertmanager and Grafana configured for gpuwatch.

Its files are the ones that the package installs under ``share/gpuwatch`` (in a checkout: ``deploy/stack``, ``alerts``
and ``dashboards/json``); only addresses are filled in.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import secrets
import shlex
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.config import DEFAULT_PORT
from gpuwatch.render.runbooks import RUNBOOKS

DISTRIBUTION = "torch-gpuwatch"
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
TARGETS = "prometheus/targets/gpuwatch.yml"
SECRETS = ".env"
RUNBOOK_PAGES = "http://127.0.0.1:9090/user/"
"""Where Prometheus serves the runbooks: what its option --web.user-assets names is below /user."""

PROMETHEUS = (
    "--config.file=prometheus/prometheus.yml --storage.tsdb.path=data/prometheus "
    "--web.listen-address=127.0.0.1:9090 --web.user-assets=prometheus/runbooks"
)
ALERTMANAGER = (
    "--config.file=alertmanager/alertmanager.yml --storage.path=data/alertmanager "
    "--web.listen-address=127.0.0.1:9093 --cluster.listen-address="
)


class StackError(ValueError):
    """The directory cannot be written as asked; the text is one line."""


@dataclass(frozen=True)
class Share:
    """Where the package's own data is: alerts, dashboards and what to deploy."""

    alerts: Path
    dashboards: Path
    deploy: Path


def write_stack(directory: Path, targets: Sequence[str] = (), force: bool = False) -> list[str]:
    """Write the stack; returns the paths of its files below the directory.

    ``targets`` are the daemons to scrape, HOST:PORT each. Raises StackError for one that is no address, for a directory
    that has something in it (``force`` writes over what is of the stack: a file that was changed stays beside it, with
    a ``~`` after its name, and so does the password), or cannot be written.
    """
    for target in targets:
        if not _is_address(target):
            raise StackError(f"--target {target!r}: expected HOST:PORT, such as {DEFAULT_TARGET}")
    try:
        if directory.exists() and not directory.is_dir():
            raise StackError(f"{directory} is not a directory; name another")
        if not force and directory.is_dir() and any(directory.iterdir()):
            raise StackError(f"{directory} is not empty; name another, or write over it with --force")
        files = dict(contents(share(), targets or (DEFAULT_TARGET,)))
        files["README.md"] = how_to_start(directory)
        for path, text in files.items():
            _write(directory, path, text)
        if not (directory / SECRETS).exists():
            _write(directory, SECRETS, f"GRAFANA_PASSWORD={secrets.token_urlsafe(12)}\n", mode=0o600)
        for data in ("data/prometheus", "data/alertmanager", "data/grafana"):
            (directory / data).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StackError(f"cannot write {error.filename or directory}: {error.strerror}") from None
    return [*files, SECRETS]


def contents(data: Share, targets: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every file of the stack as its path and its text."""
    stack = data.deploy / "stack"
    for path in sorted(stack.rglob("*")):
        if path.is_file():
            yield path.relative_to(stack).as_posix(), path.read_text("utf-8")
    yield TARGETS, _targets((stack / TARGETS).read_text("utf-8"), targets)
    for path in sorted(data.alerts.glob("*.rules.yaml")):
        yield f"prometheus/rules/{path.name}", _with_runbooks(path.read_text("utf-8"))
    for path in sorted((data.alerts / "runbooks").glob("*.md")):
        yield f"prometheus/runbooks/{path.name}", path.read_text("utf-8")
    for path in sorted(data.dashboards.glob("*.json")):
        yield f"grafana/dashboards/{path.name}", _with_runbooks(path.read_text("utf-8"))


def share() -> Share:
    """Where the data of this installation is: beside the sources in a checkout, else where the wheel put it.

    Raises StackError when it is nowhere, as in a copy of the package's directory alone.
    """
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "deploy" / "stack").is_dir():
        return Share(checkout / "alerts", checkout / "dashboards" / "json", checkout / "deploy")
    for root in _installed():
        if (root / "deploy" / "stack").is_dir():
            return Share(root / "alerts", root / "dashboards", root / "deploy")
    raise StackError(
        f"the data of {DISTRIBUTION} is not installed (share/gpuwatch): install its wheel, or run from a checkout"
    )


def _installed() -> Iterator[Path]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(DISTRIBUTION) or ():
            if file.as_posix().endswith("share/gpuwatch/deploy/stack/compose.yaml"):
                yield Path(str(file.locate())).resolve().parents[2]
    yield Path(__file__).resolve().parent.parent / "share" / "gpuwatch"  # pip install --target
    yield Path(sysconfig.get_path("data")) / "share" / "gpuwatch"


def _is_address(target: str) -> bool:
    host, _, port = target.rpartition(":")
    return (
        bool(re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", host) and re.fullmatch(r"\d{1,5}", port)) and int(port) < 65536
    )


def _targets(example: str, targets: Sequence[str]) -> str:
    comment = "".join(line for line in example.splitlines(keepends=True) if line.startswith("#"))
    return comment + "- targets:\n" + "".join(f'    - "{target}"\n' for target in targets)


def _with_runbooks(text: str) -> str:
    return text.replace(RUNBOOKS, RUNBOOK_PAGES)


def _write(directory: Path, path: str, text: str, mode: int = 0o644) -> None:
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_file() and target.read_text("utf-8", "replace") != text:
        target.replace(f"{target}~")
    written = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(written, "w", encoding="utf-8") as file:
        os.fchmod(written, mode)  # servers in containers run as users of their own, whatever the umask here
        file.write(text)


def how_to_start(directory: Path) -> str:
    """What to type, as Markdown."""
    place = shlex.quote(os.path.abspath(directory))
    return f"""\
# Prometheus, Alertmanager and Grafana for gpuwatch

The daemons to scrape are in `{TARGETS}`; on this machine start one with `gpuwatch serve`.
Put whom to tell into `alertmanager/alertmanager.yml`, below the receiver `team`.

With containers:

    cd {place}
    docker compose up -d

Without, each in a terminal of its own (Debian calls the second one `prometheus-alertmanager`):

    cd {place}
    prometheus {PROMETHEUS}
    alertmanager {ALERTMANAGER}
    GF_SERVER_HTTP_ADDR=127.0.0.1 GF_PATHS_DATA=$PWD/data/grafana GF_PATHS_PROVISIONING=$PWD/grafana/provisioning \\
      GPUWATCH_DASHBOARDS=$PWD/grafana/dashboards GF_SECURITY_ADMIN_PASSWORD=$(cut -d= -f2- {SECRETS}) \\
      grafana server --homepath /usr/share/grafana

Then see http://127.0.0.1:3000/ (user admin, the password is in `{SECRETS}`), http://127.0.0.1:9090/alerts and
http://127.0.0.1:9093/. All three listen on the loopback address alone.
"""
