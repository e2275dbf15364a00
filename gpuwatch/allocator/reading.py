"""Reading a snapshot file. Snapshots are pickles, and a pickle can run code: every global is refused here."""

from __future__ import annotations

import gc
import io
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import NoReturn

import psutil

MIB = 1 << 20
MEMORY_PER_BYTE = 12
"""Python objects take up to this many times the bytes of the file that holds them."""

MEMORY_FLOOR = 512 * MIB
SHARE_OF_FREE_MEMORY = 0.5

HOW_TO_MAKE = "expected what torch.cuda.memory._dump_snapshot() writes"


class SnapshotError(ValueError):
    """The file is no snapshot that can be used; the text is one line."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotError(
            f"refused: the file asks to load {module[:60]}.{name[:60]}, which no snapshot needs and which may run code"
        )

    def persistent_load(self, identifier: object) -> NoReturn:
        raise SnapshotError(f"refused: the file refers to objects outside itself; {HOW_TO_MAKE}")


def read_file(path: Path) -> object:
    """The plain Python objects in a snapshot file. Runs nothing. Raises SnapshotError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}") from None
    except MemoryError:
        raise SnapshotError(f"cannot read {path}: it does not fit into this machine's memory") from None
    try:
        return _unpickled(content)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None


def _unpickled(content: bytes) -> object:
    if not content:
        raise SnapshotError(f"the file is empty; {HOW_TO_MAKE}")
    if content[:1] != b"\x80":  # every protocol since 2 starts so; torch writes no older one
        raise SnapshotError(f"not a pickle; {HOW_TO_MAKE}")
    collecting = gc.isenabled()
    gc.disable()  # millions of new objects, none of them garbage: the collector would only walk them
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except SnapshotError:
        raise
    except MemoryError:
        raise SnapshotError(f"reading it takes more memory than its {len(content):,} bytes can need") from None
    except (EOFError, pickle.UnpicklingError) as error:
        raise SnapshotError(f"cut off or damaged ({_said(error)}); {HOW_TO_MAKE}") from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, ImportError) as error:
        raise SnapshotError(f"damaged ({_said(error)}); {HOW_TO_MAKE}") from None
    finally:
        if collecting:
            gc.enable()


def _said(error: BaseException) -> str:
    return ascii(str(error).partition("\n")[0])[1:-1][:80] or type(error).__name__


@contextmanager
def bounded_memory(path: Path) -> Iterator[None]:
    """Within, the process may grow by what a file of this size can need and no more: a bomb ends as MemoryError.

    For a command of its own: the limit holds for the whole process. So does the silence: Python itself prints a line
    when a byte array finds no memory (it looks at a field that it has not set yet).
    """
    try:
        needed = path.stat().st_size * MEMORY_PER_BYTE + MEMORY_FLOOR
    except OSError:
        needed = MEMORY_FLOOR
    allowed = min(needed, int(psutil.virtual_memory().available * SHARE_OF_FREE_MEMORY))
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + allowed
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
