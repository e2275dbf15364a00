"""``gpuwatch run``: start a training script watched, without a change to it.

This process becomes ``python SCRIPT ARGUMENT ...``, so arguments, ``__main__``, exit status and traceback are python's.
All that is added is a directory on PYTHONPATH, whose ``sitecustomize`` waits for torch to be imported (see
``gpuwatch_hooks.arrival``); children inherit it, so that launchers and spawned ranks are watched too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gpuwatch import config

HOOKS = "gpuwatch_hooks"
STARTUP = "startup"
_BLIND = ("E", "I")
"""Options with which python does not read PYTHONPATH."""


class LaunchError(ValueError):
    """What was given cannot be started; the text is one line."""


def launch(given: Sequence[str]) -> NoReturn:
    """Become the program that was asked for. Raises LaunchError where there is none."""
    options = interpreter_options(sys.orig_argv)
    command = command_of(given, options)
    environment = dict(os.environ) if config.disabled() else environment_of(os.environ)
    if command[0] == sys.executable and any(set(_BLIND) & set(option.lstrip("-")) for option in options):
        print("gpuwatch: python ignores PYTHONPATH (-I or -E), so the run is not watched", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from None


def command_of(given: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The command line to become: a script or a module by this Python, or a launcher such as torchrun by itself."""
    words = list(given[1:] if given[:1] == ["--"] else given)
    if not words:
        raise LaunchError("run: expected SCRIPT or -m MODULE (see gpuwatch run --help)")
    if words[0] == "-m":
        if len(words) < 2:
            raise LaunchError("run: -m expects the name of a module")
    elif words[0].startswith("-"):
        raise LaunchError(f"run: expected SCRIPT or -m MODULE, got {words[0]!r} (see gpuwatch run --help)")
    elif not os.path.exists(words[0]):
        launcher = shutil.which(words[0])
        if launcher is None:
            raise LaunchError(f"run: no file {words[0]!r}, and no command of this name")
        return [os.path.abspath(launcher), *words[1:]]
    if not sys.executable:
        raise LaunchError("run: sys.executable is empty: there is no Python to start the script with")
    return [sys.executable, *options, *words]


def interpreter_options(original: Sequence[str]) -> list[str]:
    """The options this Python was started with, from :data:`sys.orig_argv`: ``-u``, ``-W error`` and the like."""
    options: list[str] = []
    words = list(original[1:])
    while words and words[0].startswith("-") and not words[0].startswith(("-m", "-c")):
        options.append(words.pop(0))
        if options[-1] in ("-W", "-X", "--check-hash-based-pycs") and words:
            options.append(words.pop(0))
    return options


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """This environment with the start-up directory on PYTHONPATH. Raises LaunchError when the hooks are not there."""
    spec = importlib.util.find_spec(HOOKS)
    places = list(spec.submodule_search_locations or ()) if spec else []
    startup = next((place for where in places if (place := Path(where) / STARTUP).is_dir()), None)
    if startup is None:
        raise LaunchError("run: the package gpuwatch_hooks is not installed")
    known = environ.get("PYTHONPATH", "")
    return {**environ, "PYTHONPATH": f"{startup}{os.pathsep}{known}" if known else str(startup)}
