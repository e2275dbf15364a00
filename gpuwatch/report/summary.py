"""The few lines a run says about itself when it ends.

They are made inside the training process, so nothing heavy is imported here.
"""

from __future__ import annotations

import shlex

from gpuwatch.advisor import Finding, advise
from gpuwatch.reader import Snapshot
from gpuwatch.report.document import memory_of, time_of
from gpuwatch.report.wording import counted, memory_lines, printable, speed_line, split_line

FINDINGS_SHOWN = 5


def summary_lines(snapshot: Snapshot) -> list[str]:
    """What to print at the end of a run, without line ends: time, memory, the weightiest findings."""
    time = time_of(snapshot)
    name = printable(snapshot.run)
    lines = [f"gpuwatch: {name}: {speed_line(time)}"]
    if time["seconds"]:
        lines.append(f"  time: {split_line(time)}")
    memory = memory_lines(memory_of(snapshot))
    if memory:
        lines.append(f"  memory: {'; '.join(memory)}")
    findings = advise(snapshot)
    for finding in findings[:FINDINGS_SHOWN]:
        lines += _told(finding)
    more = len(findings) - FINDINGS_SHOWN
    if more > 0:
        lines.append(f"  and {counted(more, 'more finding')}")
    return [*lines, f"  the whole report: gpuwatch report {shlex.quote(name)}"]


def _told(finding: Finding) -> list[str]:
    where = f" ({printable(finding.where)})" if finding.where else ""
    return [
        f"  {finding.severity}: {finding.summary}: {printable(finding.evidence)}{where}",
        f"    fix: {finding.fix} Gain: {finding.gain}.",
    ]
