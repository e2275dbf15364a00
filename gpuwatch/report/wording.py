"""A run's numbers as a person reads them, a line each; light enough for the training process."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwatch.advisor import spoken
from gpuwatch.history import FEWEST_STEPS, WARM_UP_STEPS
from gpuwatch.report.shape import Document, MemoryPart, RunPart, TimePart

NOT_KNOWN = "not known"


def said(number: float | None, unit: str) -> str:
    """A number with its unit (see :func:`gpuwatch.advisor.spoken`), or that it is not known."""
    return NOT_KNOWN if number is None else spoken(number, unit)


def rate(steps_per_second: float | None) -> str:
    """Steps per second, three digits."""
    return NOT_KNOWN if steps_per_second is None else f"{steps_per_second:,.3g} steps/s"


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """Text from a record on one line, with what could steer a terminal written out."""
    return "".join(letter if letter.isprintable() else _written_out(letter) for letter in text)


def _written_out(letter: str) -> str:
    return " " if letter in "\n\t" else letter.encode("unicode_escape", "backslashreplace").decode("ascii")


def state_line(run: RunPart) -> str:
    """How far the run got, since when and for how long."""
    state = run["state"] + (f" ({printable(run['cause'])})" if run["cause"] else "")
    when = run["started"].replace("T", " ").replace("+00:00", " UTC")
    return f"{state}, started {when}, {said(run['run_seconds'], 'seconds')}"


def facts_line(run: RunPart) -> str:
    """What ran, on what; parts that are not known are left out."""
    ranks = counted(len(run["ranks"]), "rank")
    if run["world_size"] is not None and run["world_size"] != len(run["ranks"]):
        ranks += f" of {run['world_size']}"
    known = [
        run["script"],
        run["device"],
        run["torch"] and f"torch {run['torch']}",
        run["python"] and f"Python {run['python']}",
    ]
    return ", ".join(printable(part) for part in [*known, ranks] if part)


def speed_line(time: TimePart) -> str:
    """Steps, steps per second, quantiles of the step time."""
    line = counted(time["steps"], "step")
    if time["steps_per_second"] is not None:
        line += f", {rate(time['steps_per_second'])}"
    named = {"p50": "median", "p95": "p95", "p99": "p99"}
    known = [
        f"{named[name]} {said(seconds, 'seconds')}"
        for name, seconds in time["step_seconds"].items()
        if seconds is not None
    ]
    return line + (f"; a step: {', '.join(known)}" if known else "")


def split_line(time: TimePart) -> str:
    """The shares of the phases that were seen, in one line."""
    known = [(phase, spent["share"]) for phase, spent in time["phases"].items() if spent["share"] is not None]
    return ", ".join(f"{phase} {said(share, 'ratio')}" for phase, share in known)


def beside_line(time: TimePart) -> str:
    """Time that is no training step: evaluations, the first batches of epochs, what lies between. May be empty."""
    parts = [
        ("evaluation", time["evaluation_seconds"]),
        ("first batches", time["epoch_start_seconds"]),
        ("between", time["between_seconds"]),
    ]
    known = [f"{name} {said(seconds, 'seconds')}" for name, seconds in parts if seconds]
    return f"not in steps: {', '.join(known)}" if known else ""


def memory_lines(memory: MemoryPart) -> list[str]:
    """The host's and the device's memory, a line each; empty when nothing is known."""
    host = [
        ("peak", memory["host_peak_bytes"]),
        ("resident", memory["host_resident_bytes"]),
        ("in use (malloc)", memory["host_in_use_bytes"]),
    ]
    device = [
        ("peak", memory["device_active_peak_bytes"]),
        ("allocated", memory["device_allocated_bytes"]),
        ("reserved", memory["device_reserved_bytes"]),
        ("of", memory["device_capacity_bytes"]),
    ]
    lines = []
    for name, parts in (("host", host), ("device", device)):
        known = [f"{label} {said(size, 'bytes')}" for label, size in parts if size is not None]
        if known:
            lines.append(f"{name} {', '.join(known)}")
    return lines


def no_findings(report: Document) -> str:
    """What to say when nothing was found: whether there was enough to judge by."""
    needed = WARM_UP_STEPS + FEWEST_STEPS
    if report["time"]["steps"] < needed:
        return f"No findings; most rules need about {needed} steps, this run made {report['time']['steps']:,}."
    return "No findings."


def ranks_of(finding: Mapping[str, object], world: int) -> str:
    """Whose finding it is in a run of several ranks; empty in a run of one."""
    ranks = finding.get("ranks")
    if not isinstance(ranks, list):
        return ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whose = f"all {world} ranks" if len(ranks) == world else "ranks " + ", ".join(str(rank) for rank in ranks)
    return f"{whose}, most on rank {finding['rank']}"
