"""The daemon's pages: what is asked for, and what is answered."""

from __future__ import annotations

import gzip
import math
import os
import re
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from gpuwatch import aside
from gpuwatch.exporter import Exporter
from gpuwatch.exposition import OPENMETRICS, PLAIN
from gpuwatch.httpserver import TEXT, Application, Reply, Request
from gpuwatch.inventory import take_inventory, troubles
from gpuwatch.sampler import Sampler
from gpuwatch.sizes import size_text

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""Content-Security-Policy of the page."""

HTML = "text/html; charset=utf-8"
PAGE = "gpuwatch.page"

COMPRESSION = 1
"""Of gzip: for the text of eight ranks 0.2 ms and 8 kB; its default of 9 takes 4 ms to make that 6 kB."""

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def application(directory: Path, sampler: Sampler, allowed: Callable[[str | None], bool] | None = None) -> Application:
    """The pages of the daemon. ``allowed`` judges the Authorization header of a request, where one is asked for."""
    exporter = Exporter(directory, sampler)

    def metrics(request: Request) -> Reply:
        if request.method == "HEAD":
            return Reply(HTTPStatus.OK, TEXT)  # a look that scrapes nothing: final values are served once
        openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
        content = exporter.text(openmetrics).encode()
        headers = {}
        if _takes_gzip(request.headers.get("accept-encoding", "")):
            content, headers = gzip.compress(content, COMPRESSION), {"Content-Encoding": "gzip"}
        return Reply(HTTPStatus.OK, OPENMETRICS if openmetrics else PLAIN, content, headers)

    pages: dict[str, Callable[[Request], Reply]] = {
        "/": _StatusPage(directory, sampler).reply,
        "/metrics": metrics,
        "/-/healthy": lambda _: Reply(HTTPStatus.OK, content=b"healthy\n"),
        "/-/ready": lambda _: ready(directory),
    }

    def answer(request: Request) -> Reply:
        if allowed is not None and not allowed(request.headers.get("authorization")):
            ask = {"WWW-Authenticate": 'Basic realm="gpuwatch"'}
            reply = Reply(HTTPStatus.UNAUTHORIZED, TEXT, b"unauthorized\n", ask)
        elif request.method not in ("GET", "HEAD"):
            reply = Reply(HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b"only GET and HEAD\n", {"Allow": "GET, HEAD"})
        elif request.path in pages:
            reply = pages[request.path](request)
        else:
            reply = Reply(HTTPStatus.NOT_FOUND, content=b"not found: there are / /metrics /-/healthy /-/ready\n")
        return Reply(reply.status, reply.kind, reply.content, {**_HEADERS, **reply.headers})

    return answer


class _StatusPage:
    """The status page, made by one process at a time: whoever asks meanwhile gets the next one made."""

    def __init__(self, directory: Path, sampler: Sampler) -> None:
        self._directory = directory
        self._sampler = sampler
        self._lock = threading.Lock()
        self._begun = -math.inf
        self._last = Reply(HTTPStatus.OK)

    def reply(self, request: Request) -> Reply:
        if request.method == "HEAD":
            return Reply(HTTPStatus.OK, HTML)
        asked = time.monotonic()
        with self._lock:
            if self._begun < asked:
                self._begun = time.monotonic()
                self._last = self._made()
            return self._last

    def _made(self) -> Reply:
        try:
            take_inventory(self._directory)  # it can be listed
            return Reply(HTTPStatus.OK, HTML, aside.ask(PAGE, [str(self._directory)], self._sampler.told()))
        except OSError as error:
            return _unavailable(self._directory, error)
        except aside.AsideError as error:
            text = f"cannot make this page: {error}; /metrics is served all the same\n"
            return Reply(HTTPStatus.SERVICE_UNAVAILABLE, content=text.encode())


def _takes_gzip(header: str) -> bool:
    codings = {name.strip(): weight for name, _, weight in (part.partition(";") for part in header.split(","))}
    return "gzip" in codings and not re.fullmatch(r"\s*q=0(\.0*)?\s*", codings["gzip"])


def ready(directory: Path) -> Reply:
    """Whether the records can be read, how much room they take, and how much is left."""
    try:
        os.stat(directory)
        inventory = take_inventory(directory)
    except OSError as error:
        return _unavailable(directory, error)
    free = "unknown" if inventory.free_bytes is None else size_text(inventory.free_bytes)
    lines = [
        "ready",
        f"records: {len(inventory.entries)}, with all else {inventory.files} files of {size_text(inventory.bytes)}",
        f"free space: {free}",
        *(f"warning: {trouble}" for trouble in troubles(inventory)),
    ]
    return Reply(HTTPStatus.OK, content="".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))


def _unavailable(directory: Path, error: OSError) -> Reply:
    text = f"cannot read {directory}: {error.strerror}\n"
    return Reply(HTTPStatus.SERVICE_UNAVAILABLE, content=text.encode("utf-8", "backslashreplace"))
