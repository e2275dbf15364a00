"""The web config file: what it asks for, what is wrong with it, and that it is read again when it changes."""

from __future__ import annotations

import base64
import builtins
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from gpuwatch import webconfig
from gpuwatch.webconfig import WebConfig, WebConfigError
from tests.serving import daemon, environment, refused, serve

PASSWORD = "käse & brot:1"
HASH = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate of this machine's loopback, and its key."""
    place = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", "server.key", "-out", "server.crt", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, cwd=place, check=True, capture_output=True)
    return place


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def written(place: Path, text: str) -> Path:
    path = place / "web.yaml"
    path.write_text(text)
    return path


TLS = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"
USERS = f"basic_auth_users:\n  prometheus: {HASH}\n"


def over_tls(port: int, certificate: Path, headers: Mapping[str, str], path: str = "/metrics") -> bytes:
    context = ssl.create_default_context(cafile=str(certificate / "server.crt"))
    lines = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
    plain = socket.create_connection(("127.0.0.1", port), timeout=60)
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
        secure.sendall(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        answer = b""
        while more := secure.recv(65536):
            answer += more
        return answer


@pytest.mark.debian
def test_a_daemon_with_a_certificate_and_a_user(records: Path, certificate: Path) -> None:
    config = written(certificate, TLS + USERS)
    right = {"Authorization": basic("prometheus", PASSWORD)}
    with daemon(records, "0.0.0.0:0", web_config=str(config)) as served:
        silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
        began = time.monotonic()
        answer = over_tls(served.port, certificate, right)
        assert answer.startswith(b"HTTP/1.1 200 OK") and b"gpuwatch_records 0.0" in answer
        assert time.monotonic() - began < 4, "the silent connections held it up"
        for headers in ({}, {"Authorization": basic("prometheus", "wrong")}, {"Authorization": basic("x", PASSWORD)}):
            for path in ("/metrics", "/", "/-/healthy"):
                answer = over_tls(served.port, certificate, headers, path)
                assert answer.startswith(b"HTTP/1.1 401 Unauthorized") and b"WWW-Authenticate: Basic" in answer
                assert b"gpuwatch_records" not in answer
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as plain:
            plain.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert b"gpuwatch" not in plain.recv(1000)
        for connection in silent:
            connection.close()
        code, errors = served.stop()
    assert (code, errors) == (0, ""), "no warning: it asks for a password"


def test_listening_for_everybody_without_a_password_is_said(records: Path) -> None:
    with daemon(records, "0.0.0.0:0") as served:
        assert served.process.stderr is not None
        assert "warning: whoever reaches 0.0.0.0 can read what is served" in served.process.stderr.readline()


def test_the_right_password_alone_is_allowed(tmp_path: Path) -> None:
    config = WebConfig(written(tmp_path, f"basic_auth_users: {{a: {HASH}, b: {HASH.replace('$2b', '$2y')}}}"))
    assert config.users and not config.secure
    for _ in range(2):
        assert config.allows(basic("a", PASSWORD)) and config.allows(basic("b", PASSWORD))
    for header in (
        None, "", "Basic", "Basic !", "Bearer x", basic("a", ""), basic("", PASSWORD), basic("c", PASSWORD),
        basic("a", PASSWORD + "x"), basic("A", PASSWORD), "Basic " + "A" * 9000, "Basic /w==",
    ):  # fmt: skip
        assert not config.allows(header), header


def test_a_password_is_worked_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WebConfig(written(tmp_path, USERS))
    assert config.allows(basic("prometheus", PASSWORD))

    def slow(password: str, hashed: bytes) -> bool:
        raise AssertionError("worked out again")

    monkeypatch.setattr(webconfig, "_matches", slow)
    assert config.allows(basic("prometheus", PASSWORD))


def test_whoever_guesses_holds_up_nobody_who_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WebConfig(written(tmp_path, USERS))
    assert config.allows(basic("prometheus", PASSWORD))
    guessing, known = threading.Event(), threading.Event()

    def slow(password: str, hashed: bytes) -> bool:
        guessing.set()
        assert known.wait(10)
        return False

    monkeypatch.setattr(webconfig, "_matches", slow)
    guess = threading.Thread(target=config.allows, args=[basic("prometheus", "guess")])
    guess.start()
    assert guessing.wait(10)
    right = threading.Thread(target=lambda: known.set() if config.allows(basic("prometheus", PASSWORD)) else None)
    right.start()
    guess.join()
    assert known.is_set()
    right.join()


def test_a_file_without_an_end_and_one_that_never_comes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (webconfig.LARGEST_BYTES + 1))
    for path, said in (
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path / "large", "more than 1048576 bytes"),
    ):
        with pytest.raises(WebConfigError) as error:
            WebConfig(path)
        assert said in str(error.value)


def test_a_file_that_changes_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, USERS)
    config = WebConfig(path)
    other = bcrypt.hashpw(b"other", bcrypt.gensalt(4)).decode()
    path.write_text(f"basic_auth_users:\n  prometheus: {other}\n")
    assert config.allows(basic("prometheus", "other")) and not config.allows(basic("prometheus", PASSWORD))
    for wrong in ("basic_auth_users: [", "basic_auth_users: {}"):
        path.write_text(wrong)
        os.utime(path, (0, 0))
        for _ in range(2):
            assert config.allows(basic("prometheus", "other"))
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(line.endswith("the settings stay as they were") for line in errors)


@pytest.mark.debian
def test_a_certificate_that_changes_is_served_from_then_on(certificate: Path, tmp_path: Path) -> None:
    for name in ("server.crt", "server.key"):
        (tmp_path / name).write_bytes((certificate / name).read_bytes())
    config = WebConfig(written(tmp_path, TLS))
    before = config.context()
    assert config.context() is before
    os.utime(tmp_path / "server.crt", (1, 1))
    assert config.context() is not before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is not YAML"),
        ("7", "the file holds int, expected a mapping"),
        ("tls_config: {}", "the file has 'tls_config', which is not supported; known are tls_server_config"),
        ("tls_server_config: {cert_file: a}", "tls_server_config has no key_file"),
        ("tls_server_config: {cert_file: a, key_file: b}", "/a: No such file or directory"),
        ("tls_server_config: {cert_file: 1, key_file: b}", "cert_file is 1, expected text"),
        ("tls_server_config: {cipher_suites: []}", "has 'cipher_suites', which is not supported"),
        ("tls_server_config: [a]", "tls_server_config holds list, expected a mapping"),
        ("basic_auth_users: {a: secret}", "the hash of a is not bcrypt's: `htpasswd -nBC 10 a`"),
        ("basic_auth_users: {a: }", "the hash of a is None, expected text"),
        ("basic_auth_users: [a]", "basic_auth_users holds list, expected a mapping"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(records: Path, tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(WebConfigError) as error:
        WebConfig(written(tmp_path, text))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.debian
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("min_version: TLS10", "min_version is 'TLS10', expected one of TLS12, TLS13"),
        ("client_auth_type: RequireAnyClientCert", "client_auth_type is 'RequireAnyClientCert', expected one of"),
        ("client_auth_type: RequireAndVerifyClientCert", "there is no client_ca_file"),
        ("min_version: TLS13, max_version: TLS12", "min_version is above max_version"),
        ("client_ca_file: server.key", "cannot use its certificates"),
    ],
)
def test_a_setting_that_is_not_known_is_one_line(certificate: Path, more: str, said: str) -> None:
    text = TLS.replace("}", f", {more}}}")
    with pytest.raises(WebConfigError, match=said.replace("'", ".")):
        WebConfig(written(certificate, text))


@pytest.mark.debian
def test_clients_need_a_certificate_where_an_authority_is_named(certificate: Path, records: Path) -> None:
    config = written(certificate, TLS.replace("}", ", client_ca_file: server.crt}"))
    with daemon(records, web_config=str(config)) as served, pytest.raises(OSError):
        answer = over_tls(served.port, certificate, {})
        raise OSError(answer)  # TLS 1.3 tells the client when it reads: with nothing


def test_the_daemon_refuses_a_wrong_file_and_a_missing_one(records: Path, tmp_path: Path) -> None:
    assert "is not YAML" in refused(serve(records, web_config=str(written(tmp_path, "["))))
    line = refused(serve(records, web_config=str(tmp_path / "none.yaml")))
    assert line == f"gpuwatch: cannot read {tmp_path / 'none.yaml'}: No such file or directory\n"


@pytest.mark.parametrize(("missing", "said"), [("yaml", "--web-config needs PyYAML"), ("bcrypt", "need bcrypt: pip")])
def test_a_library_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, said: str
) -> None:
    found = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name == missing:
            raise ImportError(name)
        return found(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(WebConfigError, match=said):
        WebConfig(written(tmp_path, USERS))


def test_serving_plainly_loads_no_tls(records: Path) -> None:
    heavy = {"ssl", "yaml", "http.server", "prometheus_client", "xml", "psutil"}
    code = f"import sys, gpuwatch.daemon; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
