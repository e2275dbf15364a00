"""Whole programs, run as processes of their own: what a shell sees of them.

An interpreter that has loaded torch waits and forks for each program, which saves the second that loading torch takes.
The program then runs at that interpreter's top level: exceptions, exit handlers and the exit status are python's own.
Gpuwatch is not loaded before the fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

WAITING = """
import gc, json, os, sys, time
import numpy, torch, torch.utils.data, torch._dynamo  # the last is loaded by the first step of any optimizer
torch.set_num_threads(1)
gc.freeze()  # what a child ends with is less to look through
for line in sys.stdin:
    request = json.loads(line)
    began = time.monotonic()
    child = os.fork()
    if not child:
        break
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    seconds = time.monotonic() - began
    try:
        with open(f"/proc/{child}/schedstat") as file:
            crowded_out = int(file.read().split()[1]) / 1e9
    except OSError:  # a kernel that does not count it
        crowded_out = 0
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps({"status": status, "seconds": seconds - crowded_out}), flush=True)
else:
    sys.exit()
for number, path in enumerate((os.devnull, request["out"], request["err"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
os.environ.update(request["environment"])
os.chdir(request["directory"])
sys.argv = [request["program"]]
__file__ = request["program"]
exec(compile(open(__file__).read(), __file__, "exec"))
"""


@dataclass(frozen=True)
class Ended:
    """How a program ended; ``seconds`` are without those that its first thread waited for a core."""

    status: int
    out: str
    err: str
    seconds: float
    records: Path

    @property
    def traceback(self) -> list[str]:
        """The frames of its traceback that are the program's own, and the exception."""
        lines = [line.partition("/program.py")[2] or line for line in self.err.splitlines()]
        return [line for line in lines if line and not line.startswith((" ", "gpuwatch", "Trace"))]


class Programs:
    """Runs programs; ``stop`` ends the interpreter that waits."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0
        environment = {name: text for name, text in os.environ.items() if not name.startswith("GPUWATCH")}
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'hooks'}"
        self.environment = environment
        script = directory / "waiting.py"
        script.write_text(WAITING)
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, text: str, **environment: str) -> Ended:
        """Run a program to its end, with these variables in its environment."""
        place, settings = self._place(text, environment)
        request = {
            "program": str(place / "program.py"),
            "out": str(place / "out"),
            "err": str(place / "err"),
            "directory": str(place),
            "environment": settings,
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        out, err = (place / "out").read_text(), (place / "err").read_text()
        return Ended(answer["status"], out, err, answer["seconds"], Path(settings["GPUWATCH_DIR"]))

    def run_anew(self, text: str, *options: str, **environment: str) -> Ended:
        """Run it in an interpreter of its own, with these options on python's command line."""
        place, settings = self._place(text, environment)
        command = [sys.executable, *options, str(place / "program.py")]
        done = subprocess.run(command, cwd=place, env=self.environment | settings, capture_output=True, text=True)
        return Ended(done.returncode, done.stdout, done.stderr, 0.0, Path(settings["GPUWATCH_DIR"]))

    def _place(self, text: str, environment: dict[str, str]) -> tuple[Path, dict[str, str]]:
        self.count += 1
        place = self.directory / str(self.count)
        place.mkdir()
        (place / "program.py").write_text(text)
        return place, {"GPUWATCH_DIR": str(place / "records"), "GPUWATCH_DAEMON": "0", **environment}

    def stop(self) -> None:
        """End the interpreter that waits."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
