"""The commands that set a machine up and look after it: ``run``, ``stack``, ``doctor``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpuwatch.config import record_directory


class UsageError(ValueError):
    """The command cannot do what was asked; the text is one line."""


def add_directory(command: argparse.ArgumentParser) -> None:
    """The option that names the directory of records."""
    command.add_argument("--dir", type=Path, metavar="DIR", help="directory of flight records (default: GPUWATCH_DIR)")


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands of this file."""
    # Its options are the script's own: nothing that begins with a dash is ours, so another prefix is named.
    run = commands.add_parser(
        "run",
        help="run a training script watched, without a change to it",
        usage="gpuwatch run [--] SCRIPT [ARGUMENT ...]\n       gpuwatch run -m MODULE [ARGUMENT ...]",
        prefix_chars="\0",
        add_help=False,
    )
    run.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="SCRIPT", help="as python takes it: a file, or -m MODULE"
    )
    run.set_defaults(command=_run, parser=run)

    stack = commands.add_parser("stack", help="write a directory with Prometheus, Alertmanager and Grafana configured")
    stack.add_argument("directory", type=Path, metavar="DIR", help="where to write; an empty or a new directory")
    stack.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a daemon to scrape (default: this machine's)",
    )
    stack.add_argument("--force", action="store_true", help="write over an earlier stack; changed files stay as FILE~")
    stack.set_defaults(command=_stack)

    doctor = commands.add_parser("doctor", help="is this machine fit to be watched, and what to do where it is not")
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_directory(doctor)
    doctor.set_defaults(command=_doctor)


def _run(arguments: argparse.Namespace) -> int:
    from gpuwatch.launch import LaunchError, launch

    given: list[str] = arguments.arguments
    if given in (["-h"], ["--help"]):
        arguments.parser.print_help()
        return 0
    try:
        return launch(given)
    except LaunchError as error:
        raise UsageError(str(error)) from None


def _stack(arguments: argparse.Namespace) -> int:
    from gpuwatch.stack import StackError, how_to_start, write_stack

    try:
        written = write_stack(arguments.directory, arguments.target, arguments.force)
    except StackError as error:
        raise UsageError(str(error)) from None
    print(f"wrote {len(written)} files into {arguments.directory}\n")
    print(how_to_start(arguments.directory).partition("\n\n")[2], end="")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from gpuwatch import doctor

    found = doctor.checks(arguments.dir or record_directory())
    if arguments.json:
        print(doctor.as_json(found))
    else:
        from gpuwatch.report.terminal import show

        show(doctor.rendered(found))
    return doctor.status(found)
