"""A small HTTP server that no client can hold up: GET and HEAD, one request a connection, nothing but headers read.

http.server does as much and more. With what it imports (ssl, email) it takes 6.6 of the daemon's 25 MB, and a TLS
handshake that never ends stops it for everybody.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssl import SSLContext

REQUEST_SECONDS = 5.0
"""How long a client may take to say what it wants, the handshake included, and again to take the answer."""

HEAD_BYTES = 16 << 10
"""Most that a request may say."""

CONNECTIONS = 64
"""Open at a time. The oldest is given up for another: those that ask get their answer within milliseconds."""

CLOSING_SECONDS = 0.5
"""How long the next one waits for a connection that was given up, where few files may be open."""

TEXT = "text/plain; charset=utf-8"

_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")


@dataclass(frozen=True)
class Request:
    """What a client asks for. Names of headers are in small letters."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Reply:
    """An answer; ``headers`` are further ones."""

    status: HTTPStatus
    kind: str = TEXT
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Application = Callable[[Request], Reply]


class BadRequest(ValueError):
    """What came is no request."""


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread per connection. Raises OSError when it cannot listen.

    ``tls`` gives the context for the next connection; without it connections are plain. ``connections`` may be fewer
    than usual, where this process may not have many files open.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(
        self,
        host: str,
        port: int,
        application: Application,
        tls: Callable[[], SSLContext] | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self.application = application
        self.tls = tls
        self._connections = min(connections, CONNECTIONS)
        self._open: dict[socket.socket, None] = {}
        self._unclosed = 0  # with those that were given up
        self._changed = threading.Condition()
        super().__init__((host, port), _Handler)
        self.server_port = int(self.server_address[1])
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if tls else 'http'}://{shown}:{self.server_port}/"

    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(str(self.server_address[0]).partition("%")[0]).is_loopback

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give up the oldest connection where there are too many."""
        with self._changed:
            self._open[request] = None
            self._unclosed += 1
            oldest = next(iter(self._open)) if len(self._open) > self._connections else None
            if oldest is not None:
                del self._open[oldest]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        if self._connections < CONNECTIONS:  # few files may be open: let it be closed first
            with self._changed:
                self._changed.wait_for(lambda: self._unclosed <= self._connections, CLOSING_SECONDS)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The end of a connection."""
        super().shutdown_request(request)
        with self._changed:
            self._open.pop(request, None)
            self._unclosed -= 1
            self._changed.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line instead of a traceback."""
        error = sys.exc_info()[1]
        said = f"gpuwatch: a request of {client_address[0]} failed: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            print(said, file=sys.stderr, flush=True)


class _Handler(socketserver.BaseRequestHandler):
    server: Server

    def handle(self) -> None:
        deadline = time.monotonic() + REQUEST_SECONDS
        with contextlib.suppress(OSError):  # silent, gone, or no partner for a handshake (ssl.SSLError is one)
            plain: socket.socket = self.request
            plain.settimeout(REQUEST_SECONDS)
            if self.server.tls is None:
                self._converse(plain, deadline)
            else:
                with self.server.tls().wrap_socket(plain.dup(), server_side=True) as secure:
                    self._converse(secure, deadline)

    def _converse(self, connection: socket.socket, deadline: float) -> None:
        try:
            request = _request(connection, deadline)
        except BadRequest as error:
            request, reply = None, Reply(HTTPStatus.BAD_REQUEST, content=f"{error}\n".encode())
        else:
            if request is None:
                return
            reply = self.server.application(request)
        connection.settimeout(REQUEST_SECONDS)
        connection.sendall(_written(reply, request is not None and request.method == "HEAD"))
        if request is None or request.method not in ("GET", "HEAD"):
            _read_out(connection)


def _request(connection: socket.socket, deadline: float) -> Request | None:
    """The request, None when the client goes without one; raises TimeoutError."""
    head = b""
    while b"\r\n\r\n" not in head:
        if len(head) > HEAD_BYTES:
            raise BadRequest(f"the request is longer than {HEAD_BYTES} bytes")
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(4096)
        if not more:
            return None
        head += more
    first, *lines = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    asked = _LINE.fullmatch(first)
    if asked is None:
        raise BadRequest("expected GET /PATH HTTP/1.1")
    pairs = (line.partition(":") for line in lines)
    return Request(asked[1], asked[2].partition("?")[0], {name.lower(): text.strip() for name, _, text in pairs})


def _written(reply: Reply, head: bool) -> bytes:
    headers = {
        "Content-Type": reply.kind,
        "Content-Length": str(len(reply.content)),
        "Connection": "close",
        **reply.headers,
    }
    lines = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
    start = f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\n{lines}\r\n".encode("latin-1", "replace")
    return start if head else start + reply.content


def _read_out(connection: socket.socket) -> None:
    """Take what the client still sends: closed on unread bytes, the connection would lose the answer."""
    connection.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and connection.recv(1 << 16):
        pass
