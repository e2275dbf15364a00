"""Versions of what works together, and pairs that are known not to. Nothing is imported to find out."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuwatch.doctor.check import Check, failure, warning, well
from gpuwatch.version import __version__

VERSIONS = "versions"
DISTRIBUTION = "torch-gpuwatch"
OPTIONAL = ("torch", "prometheus-client")
"""What is shown where it is installed, beside what the package asks for."""

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
"""Those that are supported; a newer one may work."""

Version = tuple[int, ...]
Installed = Mapping[str, Version]
"""Versions by the name of the distribution, Python's among them; what is not installed is not in it."""


@dataclass(frozen=True)
class BadPair:
    """What does not work together: ``holds`` on the versions and the environment, what comes of it, what to do."""

    holds: Callable[[Installed, Mapping[str, str]], bool]
    said: str
    todo: str


BAD_PAIRS = (
    BadPair(
        lambda found, _: "pynvml" in found and found["pynvml"] < (12,),
        "the old distribution pynvml brings a module of the same name as nvidia-ml-py's",
        "`pip uninstall pynvml`, then `pip install --force-reinstall nvidia-ml-py`",
    ),
    BadPair(
        lambda found, _: "gpuwatch" in found,
        "another project's distribution, called gpuwatch, is installed too",
        "`pip uninstall gpuwatch`, then `pip install --force-reinstall --no-deps torch-gpuwatch`",
    ),
    BadPair(
        lambda found, environment: (
            found.get("torch", (0,))[:2] == (2, 13)
            and environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
        ),
        "torch 2.13 crashes with TORCH_DISTRIBUTED_DEBUG=DETAIL and DistributedDataParallel in a world of one rank",
        "unset TORCH_DISTRIBUTED_DEBUG where there is one rank",
    ),
)


def version_checks(
    environment: Mapping[str, str] = os.environ,
    found: Installed | None = None,
    needed: Mapping[str, Version] | None = None,
) -> Iterator[Check]:
    """Which versions are here, are they new enough, do they go together?"""
    needs = needed_versions() if needed is None else needed
    versions = installed((*OPTIONAL, *needs)) if found is None else found
    python = versions["python"]
    shown = [name for name in dict.fromkeys((*OPTIONAL, *needs)) if name in versions]
    parts = [f"gpuwatch {__version__}", f"Python {_dotted(python)}"]
    parts += [f"{name} {_dotted(versions[name])}" for name in shown]
    yield well(VERSIONS, ", ".join(parts))
    if "torch" not in versions:
        yield well(VERSIONS, "no torch in this Python: enough for the daemon and the reports, not for a training")
    if python[:2] < OLDEST_PYTHON:
        yield failure(VERSIONS, f"Python {_dotted(python)} is too old", f"use {_dotted(OLDEST_PYTHON)} or newer")
    elif python[:2] > NEWEST_PYTHON:
        yield warning(
            VERSIONS, f"Python {_dotted(python)} is newer than any tested", f"prefer up to {_dotted(NEWEST_PYTHON)}"
        )
    for name, oldest in needs.items():
        if name not in versions and name not in OPTIONAL:
            yield failure(VERSIONS, f"{name} is not installed", f"`pip install {name}`")
        elif name in versions and versions[name] < oldest:
            yield failure(
                VERSIONS, f"{name} {_dotted(versions[name])} is too old", f"`pip install '{name}>={_dotted(oldest)}'`"
            )
    for pair in BAD_PAIRS:
        if pair.holds(versions, environment):
            yield warning(VERSIONS, pair.said, pair.todo)


def needed_versions() -> dict[str, Version]:
    """The oldest version of each distribution that the package asks for, torch's among them."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}  # a source tree that was never installed
    needs = {}
    for line in lines:
        name, _, oldest = line.partition(";")[0].strip().partition(">=")
        if "extra" not in line.partition(";")[2] or name == "torch":
            needs[name] = _numbers(oldest)
    return needs


def installed(names: Iterable[str]) -> dict[str, Version]:
    """The versions of these distributions, and of those that get in their way."""
    found = {"python": tuple(sys.version_info[:3])}
    for name in (*names, "pynvml", "gpuwatch"):
        try:
            found[name] = _numbers(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _numbers(version: str) -> Version:
    """``2.13.0+cpu`` is (2, 13, 0), ``2.13.0rc1`` too."""
    release = re.match(r"[\d.]*", version)
    return tuple(int(part) for part in release[0].split(".") if part) if release else ()


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)
