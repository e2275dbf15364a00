"""The command ``gpuwatch``.

What a command needs is loaded when it runs: `gpuwatch serve` keeps all it loads, on every node.

Exit status: 0 done, 1 found what ``--fail-on-…`` asks for, 2 usage or input that cannot be read, with one clear line.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpuwatch import service
from gpuwatch.commands import UsageError, add_commands, add_directory
from gpuwatch.config import DEFAULT_PORT, record_directory
from gpuwatch.follower import header
from gpuwatch.layout import SUFFIX
from gpuwatch.reader import RecordError, Snapshot, read_all
from gpuwatch.report.runs import RunError, nothing_in, select_run, started_together, whole
from gpuwatch.version import __version__

if TYPE_CHECKING:
    from gpuwatch.allocator.shapes import Snapshot as Snapshotted
    from gpuwatch.rulebook import Rule

DONE, FOUND, FAILED = 0, 1, 2
INTERRUPTED = 130
"""What a shell reports for a command that Ctrl-C ended."""


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, others = super().parse_known_args(args, namespace)
        if others:  # argparse would leave it to the parser of all commands, whose help does not list their options
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return known, others

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a run's name may hold what the terminal cannot show
    try:
        arguments = parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        status = command(arguments)
        sys.stdout.flush()
        return status
    except (UsageError, RunError) as error:
        return _complain(str(error))
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough. Python would complain again while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """Every command with its options."""
    top = _Parser(prog="gpuwatch", description="What a training run spends, and why.")
    top.add_argument("--version", action="version", version=f"gpuwatch {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    report = commands.add_parser("report", help="what a run spent its time and memory on, and what to do about it")
    report.add_argument(
        "run", nargs="?", metavar="RUN", help="name of the run, or the start of it (default: the latest)"
    )
    report.add_argument("--json", action="store_true", help="print the report as JSON")
    report.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML file")
    add_directory(report)
    report.set_defaults(command=_report)

    compare = commands.add_parser(
        "compare", help="two runs side by side: what got slower or larger, findings new and gone"
    )
    compare.add_argument(
        "before", metavar="RUN_A", help="the run to measure by: its name, the start of it, or a record"
    )
    compare.add_argument("after", metavar="RUN_B", help="the run to judge")
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")
    compare.add_argument("--fail-on-regression", action="store_true", help="exit with 1 when RUN_B is worse")
    add_directory(compare)
    compare.set_defaults(command=_compare)

    serve = commands.add_parser("serve", help="serve metrics and a status page for every run of this node")
    serve.add_argument(
        "--listen",
        default=f"127.0.0.1:{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help="where to listen (default: %(default)s)",
    )
    serve.add_argument("--exit-when-idle", type=_seconds, metavar="SECONDS", help="end this long after the last run")
    serve.add_argument(
        "--web-config", type=Path, metavar="FILE", help="certificates and users, as Prometheus' exporters read them"
    )
    serve.add_argument("--any-port", action="store_true", help="take a free port when this one is busy")
    add_directory(serve)
    serve.set_defaults(command=_serve)

    explain = commands.add_parser("explain", help="what a rule means, when it fires and what to do")
    which = explain.add_mutually_exclusive_group(required=True)
    which.add_argument("rule", nargs="?", metavar="RULE", help="id of the rule, such as data-stall")
    which.add_argument("--list", action="store_true", help="list every rule")
    explain.set_defaults(command=_explain)

    _add_snapshots(commands)
    add_commands(commands)

    demo = commands.add_parser("demo", help="a real training run with planted faults, its report, and the run repaired")
    demo.add_argument("--steps", type=_steps, metavar="N", help="steps of each of the two runs")
    demo.add_argument("--without", action="append", default=[], metavar="FAULT", help="leave a planted fault out")
    demo.set_defaults(command=_demo)
    return top


def _add_snapshots(commands: argparse._SubParsersAction[_Parser]) -> None:
    snapshot = commands.add_parser("snapshot", help="who owns the GPU memory in a CUDA memory snapshot")
    snapshot.add_argument("file", type=Path, metavar="FILE", help="what torch.cuda.memory._dump_snapshot() wrote")
    snapshot.add_argument("--json", action="store_true", help="print the account as JSON")
    snapshot.add_argument("--html", type=Path, metavar="FILE", help="write it as one HTML file, with a picture")
    snapshot.set_defaults(command=_snapshot)

    replay = commands.add_parser("replay", help="which allocator setting would have helped the run in a snapshot")
    replay.add_argument("file", type=Path, metavar="FILE", help="what torch.cuda.memory._dump_snapshot() wrote")
    replay.add_argument("--conf", nargs="+", action="extend", default=[], metavar="K:V,…", help="settings to try")
    replay.add_argument("--capacity", type=_bytes, metavar="BYTES", help="memory to fit into, such as 40GiB")
    replay.add_argument("--json", action="store_true", help="print the comparison as JSON")
    replay.set_defaults(command=_replay)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _steps(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kMGT]i?)?B?\s*", text)
    power = "kMGT".index(found[2][0]) + 1 if found and found[2] else 0
    size = float(found[1]) * (1024 if found[2] and found[2].endswith("i") else 1000) ** power if found else 0
    if not 1 <= size < 1 << 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes, such as 40GiB or 80GB")
    return int(size)


def _report(arguments: argparse.Namespace) -> int:
    from gpuwatch.report.document import document
    from gpuwatch.report.html import page
    from gpuwatch.report.terminal import rendered, show

    report = document(_run(arguments.run, arguments.dir or record_directory()))
    if arguments.html is not None:
        _write(arguments.html, page(report))
    if arguments.json:
        print(json.dumps(report, indent=2, allow_nan=False))
    elif arguments.html is None:
        show(rendered(report, sys.stdout.encoding))
    else:
        print(f"wrote {arguments.html}")
    return DONE


def _compare(arguments: argparse.Namespace) -> int:
    from gpuwatch.report.comparison import compare
    from gpuwatch.report.sidebyside import rendered
    from gpuwatch.report.terminal import show

    directory = arguments.dir or record_directory()
    comparison = compare(_run_or_record(arguments.before, directory), _run_or_record(arguments.after, directory))
    if arguments.json:
        print(json.dumps(comparison, indent=2, allow_nan=False))
    else:
        show(rendered(comparison, sys.stdout.encoding))
    if arguments.fail_on_regression and comparison["regressions"]:
        return FOUND
    if arguments.fail_on_regression and comparison["not_compared"]:
        raise UsageError(f"cannot judge: {'; '.join(comparison['not_compared'])}")
    return DONE


def _run(name: str | None, directory: Path) -> list[Snapshot]:
    """A run by its name, or None for the latest."""
    heads, rejected = _heads(directory)
    return _whole(select_run(heads, name), rejected, directory)


def _run_or_record(name: str, directory: Path) -> list[Snapshot]:
    """A run by its name, or by the file of one of its records (kept by an earlier build, say)."""
    path = Path(name)
    if path.suffix != SUFFIX and not (name and os.sep in name and path.exists()):
        return _run(name, directory)
    if path.suffix != SUFFIX or not path.is_file():
        raise UsageError(f"no record {path}: expected the name of a run or a file that ends in {SUFFIX}")
    try:
        record = header(path)
    except (OSError, RecordError) as error:
        raise UsageError(f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)) from None
    heads, rejected = _heads(path.parent)
    return _whole(started_together(record, heads), rejected, path.parent)


def _heads(directory: Path) -> tuple[list[Snapshot], list[tuple[str, str]]]:
    try:
        heads, rejected = read_all(directory, header)
    except OSError as error:
        raise UsageError(f"cannot read the directory of records {directory}: {_and_now(error, directory)}") from None
    if not heads:
        _say_skipped(rejected, directory)
        raise RunError(nothing_in(directory))
    return heads, rejected


def _and_now(error: OSError, directory: Path) -> str:
    """Why a directory cannot be listed, and what there is instead."""
    if not isinstance(error, PermissionError):
        return error.strerror or str(error)
    page = service.running(directory)
    shown = f"see {page}" if page else "a daemon (`gpuwatch serve`) shows what is in it"
    return f"{error.strerror}; {shown}, or keep records of your own: set GPUWATCH_DIR when you train"


def _whole(heads: Sequence[Snapshot], rejected: list[tuple[str, str]], directory: Path) -> list[Snapshot]:
    """The records of a run, those that cannot be read left out and told of."""
    snapshots, more = whole(heads)
    _say_skipped(rejected + more, directory)
    return snapshots


def _say_skipped(rejected: Sequence[tuple[str, str]], directory: Path) -> None:
    from gpuwatch.report.wording import counted, printable

    if rejected:
        _, reason = rejected[0]
        more = f" (and {len(rejected) - 1} more)" if len(rejected) > 1 else ""
        said = f"skipped {counted(len(rejected), 'unreadable record')} in {directory}: {reason}{more}"
        print(f"gpuwatch: {printable(said)}", file=sys.stderr)


def _serve(arguments: argparse.Namespace) -> int:
    from gpuwatch.daemon import serve

    return serve(
        arguments.listen,
        arguments.dir or record_directory(),
        exit_when_idle=arguments.exit_when_idle,
        any_port=arguments.any_port,
        web_config=arguments.web_config,
    )


def _explain(arguments: argparse.Namespace) -> int:
    from gpuwatch.rulebook import RULES

    if arguments.list:
        width = max(len(rule.id) for rule in RULES)
        for rule in RULES:
            print(f"{rule.id:{width}}  {rule.severity:8}  {rule.title}")
        return DONE
    from rich.markdown import Markdown

    from gpuwatch.render.runbooks import runbook
    from gpuwatch.report.terminal import show

    text = runbook(_rule(arguments.rule))
    if sys.stdout.isatty():
        show(Markdown(text))
    else:
        print(text)
    return DONE


def _snapshot(arguments: argparse.Namespace) -> int:
    from gpuwatch.allocator.document import explain
    from gpuwatch.allocator.reading import SnapshotError
    from gpuwatch.report.snapshot import snapshot_rendered
    from gpuwatch.report.snapshot_html import PlotLibraryMissing, snapshot_page
    from gpuwatch.report.terminal import show

    try:
        document, accounts = explain(_snapshot_file(arguments.file))
        if arguments.html is not None:
            _write(arguments.html, snapshot_page(document, accounts, arguments.file.name))
    except PlotLibraryMissing as error:
        raise UsageError(str(error)) from None
    except SnapshotError as error:
        raise UsageError(_named(arguments.file, error)) from None
    if arguments.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    elif arguments.html is None:
        show(snapshot_rendered(document, arguments.file.name, sys.stdout.encoding))
    else:
        print(f"wrote {arguments.html}")
    return DONE


def _replay(arguments: argparse.Namespace) -> int:
    from gpuwatch.allocator.document import compare
    from gpuwatch.allocator.reading import SnapshotError
    from gpuwatch.allocator.settings import SettingsError
    from gpuwatch.report.snapshot import replay_rendered
    from gpuwatch.report.terminal import show

    try:
        document = compare(_snapshot_file(arguments.file), arguments.conf, arguments.capacity)
    except SettingsError as error:
        raise UsageError(f"--conf: {error}") from None
    except SnapshotError as error:
        raise UsageError(_named(arguments.file, error)) from None
    if arguments.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        show(replay_rendered(document, arguments.file.name, sys.stdout.encoding))
    return DONE


def _snapshot_file(path: Path) -> Snapshotted:
    from gpuwatch.allocator.parsing import read_snapshot
    from gpuwatch.allocator.reading import bounded_memory

    with bounded_memory(path):
        return read_snapshot(path)


def _named(path: Path, error: Exception) -> str:
    return str(error) if str(path) in str(error) else f"{path}: {error}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _rule(name: str) -> Rule:
    import difflib

    from gpuwatch.rulebook import RULES_BY_ID

    rule = RULES_BY_ID.get(name)
    if rule is None:
        close = difflib.get_close_matches(name, RULES_BY_ID, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else "`gpuwatch explain --list` lists them"
        raise UsageError(f"no rule {name!r}: {hint}")
    return rule


def _demo(arguments: argparse.Namespace) -> int:
    from gpuwatch.demo import FAULTS, STEPS, DemoError, demo

    names = [fault.name for fault in FAULTS]
    unknown = [name for name in arguments.without if name not in names]
    if unknown:
        raise UsageError(f"no planted fault {unknown[0]!r}; there are: {', '.join(names)}")
    try:
        return demo(arguments.without, arguments.steps or STEPS)
    except DemoError as error:
        raise UsageError(str(error)) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"the demo cannot run: {error}") from None


def _complain(message: str) -> int:
    from gpuwatch.report.wording import printable

    print(f"gpuwatch: {printable(message)}", file=sys.stderr)
    return FAILED
