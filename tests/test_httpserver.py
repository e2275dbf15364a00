"""The HTTP server: what it answers, and that no client holds it up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from gpuwatch import httpserver
from gpuwatch.httpserver import HEAD_BYTES, Reply, Request, Server


def echo(request: Request) -> Reply:
    if request.path == "/wrong":
        raise ValueError("planted")
    return Reply(HTTPStatus.OK, content=f"{request.method} {request.path} {request.headers.get('x-y')}".encode())


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("127.0.0.1", 0, echo)
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def ask(server: Server, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(text)
        return everything(connection)


def everything(connection: socket.socket) -> bytes:
    answer = b""
    while more := connection.recv(65536):
        answer += more
    return answer


def test_a_request_is_answered_and_the_connection_closed(server: Server) -> None:
    head, _, body = ask(server, b"GET /a/b?c=d HTTP/1.1\r\nHost: x\r\nX-Y:  z \r\n\r\n").partition(b"\r\n\r\n")
    assert body == b"GET /a/b z"
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 10" in head and b"Connection: close" in head


def test_a_head_has_no_body(server: Server) -> None:
    answer = ask(server, b"HEAD / HTTP/1.0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n") and b"Content-Length: 11" in answer


def test_a_request_in_small_pieces_is_one_request(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        for piece in (b"GE", b"T / HTTP/1.1\r", b"\n\r", b"\n"):
            connection.sendall(piece)
            time.sleep(0.02)
        assert everything(connection).endswith(b"GET / None")


@pytest.mark.parametrize(
    "text",
    [
        b"\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n",
        b"GET x HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET /\nHost: x HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * (HEAD_BYTES + 4096),
    ],
)
def test_what_is_no_request_is_said_to_be_none(server: Server, text: bytes) -> None:
    assert ask(server, text).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_a_body_that_nobody_reads_does_not_lose_the_answer(server: Server) -> None:
    body = b"x" * 300_000
    answer = ask(server, b"POST / HTTP/1.1\r\nContent-Length: 300000\r\n\r\n" + body)
    assert answer.endswith(b"POST / None")


def test_a_fault_of_a_page_is_one_line_and_the_next_request_is_answered(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(server, b"GET /wrong HTTP/1.1\r\n\r\n") == b""
    assert ask(server, b"GET / HTTP/1.1\r\n\r\n").endswith(b"GET / None")
    assert capsys.readouterr().err == "gpuwatch: a request of 127.0.0.1 failed: ValueError: planted\n"


def test_silent_and_slow_clients_are_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpserver, "REQUEST_SECONDS", 0.3)
    with contextlib.ExitStack() as stack:
        silent, slow = (
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=60))
            for _ in range(2)
        )
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 30:  # a byte now and then keeps nobody waiting for longer
                slow.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - began < 20
        assert silent.recv(1) == b""


def test_more_silent_clients_than_it_takes_keep_nobody_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_connections", 8)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=60))
            for _ in range(30)
        ]
        assert ask(server, b"GET / HTTP/1.1\r\n\r\n").endswith(b"GET / None")
        assert silent[0].recv(1) == b""
        assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) < 30


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_loopback_is_known(host: str, shown: str) -> None:
    with Server(host, 0, echo) as made:
        assert made.is_loopback()
        assert made.url.startswith(shown)


def test_all_addresses_are_no_loopback() -> None:
    with Server("0.0.0.0", 0, echo) as made:
        assert not made.is_loopback()
