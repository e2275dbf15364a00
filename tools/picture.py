"""Draw a run's report as it looks in a terminal: ``python -m tools.picture [RUN] > docs/report.svg``."""

from __future__ import annotations

import io
import re
import sys

from rich.console import Console

from gpuwatch.config import record_directory
from gpuwatch.report.document import document
from gpuwatch.report.runs import find_run
from gpuwatch.report.terminal import rendered

WIDTH = 92


def picture(run: str | None) -> str:
    """The report of a run (the latest by default) as an SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(rendered(document(find_run(record_directory(), run))))
    drawn = console.export_svg(title="gpuwatch report")
    # The viewer's own monospace font will do: a picture fetches nothing from elsewhere.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


if __name__ == "__main__":
    sys.stdout.write(picture(sys.argv[1] if len(sys.argv) > 1 else None))
