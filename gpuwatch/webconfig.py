"""Who may read what the daemon serves: a web config file, in the form that Prometheus and its exporters read.

::

    tls_server_config:
      cert_file: server.crt     # beside this file, or with a full path
      key_file: server.key
      client_ca_file: ca.crt    # clients need a certificate of this authority
      min_version: TLS12
    basic_auth_users:
      prometheus: $2b$10$...    # bcrypt, as `htpasswd -nBC 10 prometheus` writes it

The files are read again when they change; one that is wrong by then changes nothing.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import ssl
import stat
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_TLS_KEYS = ("cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version", "max_version")
_KEYS = ("tls_server_config", "basic_auth_users", "http_server_config")
_UNUSED = {"http2"}
"""Settings that say nothing to a server of one request a connection."""

LARGEST_BYTES = 1 << 20
"""Of a web config file."""

REMEMBERED = 32
"""Passwords that were right, kept as digests under a key of this process: bcrypt takes 50 ms or more each time."""

_NOBODY = b"$2b$10$QhKzLGQyeVDcrqbmMdIgDe3HcQt4J4ccTsdXA0rgmVhrR0lYsIDQC"
"""Compared with where there is no such user, so that the time does not tell."""


_Choice = TypeVar("_Choice")


class WebConfigError(ValueError):
    """The file cannot be used; the text is one line: what came, what was expected."""


@dataclass(frozen=True)
class _Settings:
    context: ssl.SSLContext | None
    users: Mapping[str, bytes]
    files: Mapping[Path, tuple[int, int, int] | None]


class WebConfig:
    """The settings of a web config file, for any thread. Raises WebConfigError when the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._guessing = threading.Lock()  # of its own: whoever has shown the right password does not wait for guesses
        self._key = os.urandom(32)
        self._right: dict[bytes, None] = {}
        self._settings = _read(path)
        self._failed: object = None
        self.secure = self._settings.context is not None
        self.users = bool(self._settings.users)
        context = self._settings.context
        self.asks = self.users or (context is not None and context.verify_mode == ssl.CERT_REQUIRED)

    def context(self) -> ssl.SSLContext:
        """The context for the next connection."""
        context = self._current().context
        assert context is not None
        return context

    def allows(self, authorization: str | None) -> bool:
        """Whether these are a user's name and password."""
        if not authorization:
            return False
        name, password = _credentials(authorization)
        users = self._current().users
        digest = hmac.new(self._key, repr((name, password, users.get(name))).encode(), hashlib.sha256).digest()
        if digest in self._right:
            return True
        with self._guessing:  # one at a time: it must not take all cores
            right = _matches(password, users.get(name, _NOBODY)) and name in users
            if right:
                if len(self._right) >= REMEMBERED:
                    self._right.clear()
                self._right[digest] = None
        return right

    def _current(self) -> _Settings:
        with self._lock:
            state = {path: _state(path) for path in self._settings.files}
            if state != self._settings.files and state != self._failed:
                try:
                    settings = _read(self._path)
                    if (settings.context is not None, bool(settings.users)) != (self.secure, self.users):
                        raise WebConfigError(f"{self._path} asks for another kind of server: start the daemon again")
                    self._settings = settings
                except WebConfigError as error:
                    self._failed = state
                    with contextlib.suppress(OSError):
                        print(f"gpuwatch: {error}; the settings stay as they were", file=sys.stderr, flush=True)
            return self._settings


def _read(path: Path) -> _Settings:
    try:
        import yaml
    except ImportError:
        raise WebConfigError("--web-config needs PyYAML: pip install 'torch-gpuwatch[web]'") from None
    try:
        content = yaml.safe_load(_content(path).decode())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise WebConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    settings = _section(path, "the file", {} if content is None else content, _KEYS)
    _section(path, "http_server_config", settings.get("http_server_config") or {}, tuple(_UNUSED))
    tls = _section(path, "tls_server_config", settings.get("tls_server_config") or {}, _TLS_KEYS)
    named = {key: path.parent / _text(path, key, tls[key]) for key in _TLS_KEYS[:3] if key in tls}
    return _Settings(
        _context(path, tls, named) if tls else None,
        _users(path, settings.get("basic_auth_users") or {}),
        {each: _state(each) for each in (path, *named.values())},
    )


def _content(path: Path) -> bytes:
    """What is in a file, which neither keeps us waiting nor has no end. Raises WebConfigError."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise WebConfigError(f"cannot read {path}: it is not a regular file")
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise WebConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > LARGEST_BYTES:
        raise WebConfigError(f"cannot read {path}: it has more than {LARGEST_BYTES} bytes")
    return content


def _section(path: Path, name: str, content: object, known: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(content, dict):
        raise WebConfigError(f"{path}: {name} holds {type(content).__name__}, expected a mapping")
    for key in content:
        if key not in known:
            raise WebConfigError(f"{path}: {name} has {key!r}, which is not supported; known are {', '.join(known)}")
    return content


def _text(path: Path, key: str, content: object) -> str:
    if not isinstance(content, str):
        raise WebConfigError(f"{path}: {key} is {content!r}, expected text")
    return content


def _context(path: Path, tls: Mapping[str, object], named: Mapping[str, Path]) -> ssl.SSLContext:
    for key in ("cert_file", "key_file"):
        if key not in named:
            raise WebConfigError(f"{path}: tls_server_config has no {key}")
    for each in named.values():
        _content(each)  # OpenSSL names no file that it cannot read
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(named["cert_file"], named["key_file"], lambda: "")
        if "client_ca_file" in named:
            context.load_verify_locations(named["client_ca_file"])
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise WebConfigError(f"{path}: cannot use its certificates: {error}") from None
    asked = tls.get("client_auth_type", "RequireAndVerifyClientCert" if "client_ca_file" in named else "NoClientCert")
    context.verify_mode = _one_of(path, "client_auth_type", asked, CLIENTS)
    if context.verify_mode != ssl.CERT_NONE and "client_ca_file" not in named:
        raise WebConfigError(f"{path}: client_auth_type is {asked!r}, and there is no client_ca_file")
    context.minimum_version = _one_of(path, "min_version", tls.get("min_version", "TLS12"), VERSIONS)
    context.maximum_version = _one_of(path, "max_version", tls.get("max_version", "TLS13"), VERSIONS)
    if context.minimum_version > context.maximum_version:
        raise WebConfigError(f"{path}: min_version is above max_version: no client could ever connect")
    return context


def _users(path: Path, users: object) -> dict[str, bytes]:
    if not isinstance(users, dict):
        raise WebConfigError(f"{path}: basic_auth_users holds {type(users).__name__}, expected a mapping")
    found = {}
    for name, text in users.items():
        try:
            found[_text(path, "a user", name)] = _text(path, f"the hash of {name}", text).encode()
            _matches("", found[name])
        except WebConfigError:
            raise
        except ValueError:
            raise WebConfigError(f"{path}: the hash of {name} is not bcrypt's: `htpasswd -nBC 10 {name}`") from None
    return found


def _one_of(path: Path, key: str, content: object, choices: Mapping[str, _Choice]) -> _Choice:
    if not isinstance(content, str) or content not in choices:
        raise WebConfigError(f"{path}: {key} is {content!r}, expected one of {', '.join(choices)}")
    return choices[content]


def _credentials(authorization: str | None) -> tuple[str, str]:
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, UnicodeError):
            name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
            return name, password
    return "", ""


def _matches(password: str, hashed: bytes) -> bool:
    """Whether it is the password. Raises ValueError for a hash that is not bcrypt's, WebConfigError without bcrypt."""
    try:
        import bcrypt
    except ImportError:
        raise WebConfigError("basic_auth_users need bcrypt: pip install 'torch-gpuwatch[web]'") from None
    return bcrypt.checkpw(password.encode()[:72], hashed)  # bcrypt itself reads no further


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
