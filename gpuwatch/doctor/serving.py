"""The daemon, and the port it would take."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from gpuwatch import service
from gpuwatch.config import DAEMON, DEFAULT_PORT, daemon_wanted
from gpuwatch.doctor.check import Check, failure, warning, well
from gpuwatch.report.wording import printable
from gpuwatch.version import __version__

SERVING, PORT = "daemon", "port"
PATIENCE_SECONDS = 3.0
_LARGEST_PAGE_BYTES = 4 << 20


def daemon_checks(directory: Path) -> Iterator[Check]:
    """Does a daemon serve the directory, does it answer, and is it of this version?"""
    url = service.running(directory)
    if url is None:
        if daemon_wanted():
            yield well(SERVING, "none serves the directory; the first run starts one")
        else:
            yield warning(
                SERVING,
                f"none serves the directory, and {DAEMON} forbids runs to start one",
                "start the service, or `gpuwatch serve`",
            )
        return
    page = fetch(url + "metrics")
    if page is None:
        yield failure(
            SERVING,
            f"one holds the directory but does not answer at {printable(url)}",
            f"end the process named in {printable(str(directory / service.FILE))} and start it again; a proxy setting "
            "(`http_proxy`) may be in the way too",
        )
        return
    version = version_of(page)
    if version != __version__:
        yield warning(
            SERVING, f"{url} is of version {version or 'unknown'}, this is {__version__}", "restart the daemon"
        )
    elif 'gpuwatch_source_up{source="records"} 1.0' not in page:
        yield failure(
            SERVING, f"{url} answers but cannot read the records", "give the daemon's user the right to list them"
        )
    else:
        yield well(SERVING, f"{url} answers, version {version}")


def port_checks(directory: Path, port: int = DEFAULT_PORT) -> Iterator[Check]:
    """Whose is the default port on the loopback address: free, ours, or somebody else's?"""
    if (service.running(directory) or "").endswith(f":{port}/"):
        yield well(PORT, f"{port} is this directory's daemon's")
        return
    if _free(port):
        yield well(PORT, f"{port} is free")
        return
    page = fetch(f"http://127.0.0.1:{port}/metrics")
    if page is not None and version_of(page) is not None:
        yield warning(
            PORT,
            f"{port} is another gpuwatch daemon's, of another directory",
            "one daemon a node is enough where users share /run/gpuwatch; else give this one `--listen` another port",
        )
    else:
        yield warning(
            PORT,
            f"{port} is taken by somebody else's process",
            "`gpuwatch serve --listen 127.0.0.1:PORT`; a daemon that a run starts takes a free port by itself",
        )


def fetch(url: str) -> str | None:
    """The page, None when nobody answers in time or with something else than a page."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the daemon is on this machine
    try:
        with opener.open(url, timeout=PATIENCE_SECONDS) as answer:
            return bytes(answer.read(_LARGEST_PAGE_BYTES)).decode("utf-8", "replace")
    except (OSError, HTTPException, ValueError):
        return None


def version_of(page: str) -> str | None:
    """The version of the daemon that served these metrics; None when it is none of ours."""
    found = re.search(r'^gpuwatch_build_info\{version="([^"]{1,40})"\} 1', page, re.MULTILINE)
    return None if found is None else found[1]


def _free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False
