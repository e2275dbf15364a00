"""The daemon's pages over HTTP: routes, and a server that no client can hold up."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from gpuwatch.exporter import Exporter
from gpuwatch.page import POLICY, StatusPage
from gpuwatch.sampler import Sampler

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

REQUEST_SECONDS = 5.0
"""How long a connection may say nothing."""

_TEXT = "text/plain; charset=utf-8"


def application(directory: Path, sampler: Sampler) -> WSGIApplication:
    """The pages of the daemon as a WSGI application."""
    registry = CollectorRegistry()
    registry.register(Exporter(directory, sampler))
    metrics = make_wsgi_app(registry)
    page = StatusPage(directory, sampler)

    def status() -> tuple[HTTPStatus, str, bytes]:
        try:
            return HTTPStatus.OK, "text/html; charset=utf-8", page.render()
        except OSError as error:
            return _unavailable(directory, error)

    def healthy() -> tuple[HTTPStatus, str, bytes]:
        return HTTPStatus.OK, _TEXT, b"healthy\n"

    def ready() -> tuple[HTTPStatus, str, bytes]:
        try:
            next(directory.iterdir(), None)
        except OSError as error:
            return _unavailable(directory, error)
        return HTTPStatus.OK, _TEXT, b"ready\n"

    pages = {"/": status, "/-/healthy": healthy, "/-/ready": ready}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method not in ("GET", "HEAD"):
            reply = HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET and HEAD\n"
        elif path == "/metrics":
            if method == "GET":
                scraped: Iterable[bytes] = metrics(environ, start_response)
                return scraped
            reply = HTTPStatus.OK, _TEXT, b""  # a look that scrapes nothing: final values are served once
        elif path in pages:
            reply = pages[path]()
        else:
            reply = HTTPStatus.NOT_FOUND, _TEXT, b"not found: there are / /metrics /-/healthy /-/ready\n"
        return _send(reply, method == "HEAD", start_response)

    return answer


def _send(reply: tuple[HTTPStatus, str, bytes], head: bool, start_response: StartResponse) -> Iterable[bytes]:
    status, kind, content = reply
    headers = [
        ("Content-Type", kind),
        ("Content-Length", str(len(content))),
        ("Content-Security-Policy", POLICY),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-store"),
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", "GET, HEAD"))
    start_response(f"{status.value} {status.phrase}", headers)
    return [b"" if head else content]


def _unavailable(directory: Path, error: OSError) -> tuple[HTTPStatus, str, bytes]:
    text = f"cannot read {directory}: {error.strerror}\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, text.encode("utf-8", "backslashreplace")


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape is no news."""


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread per connection, so that a silent one holds up nobody. Raises OSError when it cannot listen."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)
        self.set_app(application)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_port}/"

    def server_bind(self) -> None:
        # Not HTTPServer's: that one asks the name service who we are, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        print(f"gpuwatch: a request of {client_address[0]} failed: {type(error).__name__}: {error}", file=sys.stderr)
