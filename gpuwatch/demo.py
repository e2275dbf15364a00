"""``gpuwatch demo``: a real training run with planted faults, its report, and the same run with the advice applied.

The training is a process of its own (``demo_training.py`` of the hooks, which imports torch), watched as any other: the
progress bar reads its flight record while it runs, and every finding comes from that record.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gpuwatch import config
from gpuwatch.reader import RecordError, Snapshot, read, read_all
from gpuwatch.report.document import document
from gpuwatch.report.shape import Document
from gpuwatch.report.terminal import heading, rendered, show
from gpuwatch.report.wording import NOT_KNOWN, rate, said

STEPS = 250
"""Steps of each run; below about 100 the slowest detector has seen too little."""

SCRIPT = "demo_training.py"
POLL_SECONDS = 0.2
PATIENCE_SECONDS = 5.0
"""How long a run that is told to end may take before it is killed."""


class DemoError(RuntimeError):
    """The demo cannot go on; the text is one line."""


@dataclass(frozen=True)
class Fault:
    """A planted fault: its name for ``--without``, what was planted, and the rule that must find it."""

    name: str
    planted: str
    rule: str


FAULTS = (
    Fault("anomaly", "anomaly detection left on", "debug-anomaly"),
    Fault("workers", "slow items loaded with num_workers=0", "data-workers-zero"),
    Fault("validation", "a validation without no_grad", "eval-grad-enabled"),
    Fault("losses", "a list that keeps every loss with its graph", "leak-graph-retained"),
    Fault("zeros", "zero_grad(set_to_none=False)", "opt-zero-grad-inplace"),
)


@dataclass(frozen=True)
class Outcome:
    """A finished run: its report, and the last loss that the script printed."""

    report: Document
    loss: str


def demo(without: Sequence[str] = (), steps: int = STEPS) -> int:
    """Train twice and print what was found; returns the exit status. Raises DemoError, and OSError for no room."""
    if importlib.util.find_spec("torch") is None:
        raise DemoError("the demo trains a model and needs torch: pip install torch")
    planted = [fault for fault in FAULTS if fault.name not in without]
    show(
        Text(
            f"A small character-level transformer learns Python's manual topics, {steps} steps, twice: first with "
            f"planted faults ({'; '.join(fault.planted for fault in planted) or 'none'}), then with the advice applied."
        )
    )
    with tempfile.TemporaryDirectory(prefix="gpuwatch-demo-") as scratch, _progress() as bars:
        training = Training(Path(scratch), steps)
        before = training.run("demo-planted", without, bars, "with planted faults")
        after = training.run("demo-repaired", [fault.name for fault in FAULTS], bars, "with the advice applied")
    encoding = sys.stdout.encoding
    show(Group(Text(), rendered(before.report, encoding), Text(), rendered(after.report, encoding), Text()))
    show(
        Group(heading("before and after", encoding), comparison(before, after), gone_line(before.report, after.report))
    )
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield bars


class Training:
    """Runs the training script in a scratch directory, as often as asked."""

    def __init__(self, scratch: Path, steps: int) -> None:
        self.scratch = scratch
        self.steps = steps
        self.script = scratch / SCRIPT
        # A copy: frames of an installed hook are not shown as the user's, and this script stands for the user's.
        self.script.write_text(importlib.resources.files("gpuwatch_hooks").joinpath(SCRIPT).read_text("utf-8"), "utf-8")
        self.records = Path(os.environ.get(config.DIRECTORY) or scratch / "records").expanduser()

    def run(self, name: str, without: Sequence[str], bars: Progress, description: str) -> Outcome:
        """One run; raises DemoError when it fails, after showing what it said."""
        command = [sys.executable, str(self.script), "--steps", str(self.steps), "--name", name]
        command += [part for fault in without for part in ("--without", fault)]
        output, errors = self.scratch / f"{name}.out", self.scratch / f"{name}.err"
        if bars.disable:
            print(f"gpuwatch: training {description}, {self.steps} steps", file=sys.stderr)
        bar = bars.add_task(description, total=self.steps)
        with output.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
            try:
                status = self._follow(process, bars, bar)
            finally:
                _end(process)
        snapshot = None if status else _record_of(self.records, process.pid)
        if snapshot is None:
            sys.stderr.write(errors.read_text("utf-8", "replace"))
            failure = f"ended with status {status}" if status else f"left no record in {self.records}"
            raise DemoError(f"the training run {description} {failure}; what it said is above")
        printed = re.search(r"last loss (\S+)", output.read_text("utf-8", "replace"))
        return Outcome(document([snapshot]), printed[1] if printed else NOT_KNOWN)

    def _follow(self, process: subprocess.Popen[bytes], bars: Progress, bar: TaskID) -> int:
        path: Path | None = None
        while True:
            try:
                return process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            if path is None:
                found = _record_of(self.records, process.pid)
                path = None if found is None else found.path
            else:
                with contextlib.suppress(OSError, RecordError):
                    bars.update(bar, completed=read(path).step)

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != config.DISABLE}
        environment |= {config.DIRECTORY: str(self.records), config.DAEMON: "0", config.QUIET: "1"}
        roots = [root for package in ("gpuwatch", "gpuwatch_hooks") if (root := _checkout_of(package))]
        known = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        return environment | {"PYTHONPATH": os.pathsep.join([*roots, *known])}


def _record_of(records: Path, pid: int) -> Snapshot | None:
    snapshots, _ = read_all(records)
    return next((snapshot for snapshot in reversed(snapshots) if snapshot.pid == pid), None)


def _checkout_of(package: str) -> str | None:
    """Where a package is imported from when it is not installed: a process of another directory must be told."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations))).parent
    return None if root.name in ("site-packages", "dist-packages") else str(root)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def comparison(before: Outcome, after: Outcome) -> Table:
    """What was measured in both runs, side by side."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in ("planted faults", "advice applied", ""):
        table.add_column(name, justify="right")
    old, new = before.report, after.report
    speeds = old["time"]["steps_per_second"], new["time"]["steps_per_second"]
    medians = old["time"]["step_seconds"]["p50"], new["time"]["step_seconds"]["p50"]
    waits = old["time"]["phases"]["data"]["share"], new["time"]["phases"]["data"]["share"]
    peaks = old["memory"]["host_peak_bytes"], new["memory"]["host_peak_bytes"]
    table.add_row("training speed", rate(speeds[0]), rate(speeds[1]), _times(speeds[1], speeds[0], "as fast"))
    table.add_row("median step", said(medians[0], "seconds"), said(medians[1], "seconds"), "")
    table.add_row("waiting for data", said(waits[0], "ratio"), said(waits[1], "ratio"), "")
    table.add_row(
        "peak host memory (resident)",
        said(peaks[0], "bytes"),
        said(peaks[1], "bytes"),
        _times(peaks[0], peaks[1], "less"),
    )
    table.add_row("findings", str(len(old["findings"])), str(len(new["findings"])), "")
    same = "the same" if before.loss == after.loss else "another"
    table.add_row("loss at the last step", before.loss, after.loss, same)
    return table


def _times(larger: float | None, smaller: float | None, what: str) -> str:
    return f"{larger / smaller:.1f}x {what}" if larger is not None and smaller else ""


def gone_line(before: Document, after: Document) -> str:
    """Which findings went and which are left."""
    left = [str(finding["rule"]) for finding in after["findings"]]
    gone = [str(finding["rule"]) for finding in before["findings"] if finding["rule"] not in left]
    return f"gone: {', '.join(gone) or 'none'}" + (f"; left: {', '.join(left)}" if left else "")
