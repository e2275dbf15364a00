"""Many ranks in a real Prometheus on this machine: series, samples, memory, the time its rules take.

One small server stands for all nodes; each is a target of its own, with eight ranks that say what a real one said.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from gpuwatch.exporter import Exporter
from gpuwatch.httpserver import Reply, Request, Server
from gpuwatch.nvml import GpuReading, NvmlUnavailable
from gpuwatch.sampler import Sampler

RANKS_PER_NODE = 8
SCRAPE_SECONDS = 5
RULES = Path(__file__).resolve().parent.parent / "alerts" / "gpuwatch.rules.yaml"
_GROWING = re.compile(r"_(total|bucket|count|sum)\{")


@dataclass(frozen=True)
class FleetCost:
    """What a Prometheus said of itself after ``seconds``; rule_seconds is one evaluation of all rules.

    ``slowest`` are the rules that take most of it, with their seconds.
    """

    ranks: int
    targets: int
    series: int
    samples_a_second: float
    resident_bytes: int
    cpu_cores: float
    rule_seconds: float
    scrape_seconds: float
    seconds: float
    slowest: list[tuple[str, float]]


class Nodes:
    """Expositions of nodes: a real rank's, under the names of eight others. Counters grow, gauges move a little."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = [tuple(line.rsplit(" ", 1)) for line in lines]
        self._began = time.monotonic()

    def text(self, node: int) -> str:
        """What a scrape of this node says now."""
        age = time.monotonic() - self._began
        written = []
        for local in range(RANKS_PER_NODE):
            rank = f'rank="{node * RANKS_PER_NODE + local}"'
            for series, number in self._lines:
                known = float(number)
                now = known * (1 + age / 600) if _GROWING.search(series) else known * random.uniform(0.98, 1.02)
                written.append(f"{series.replace('rank=@', rank)} {now}\n")
        return "".join(written)


def rank_lines(directory: Path) -> list[str]:
    """The series of the one rank that lives in a directory, with ``rank=@`` for its rank."""

    def none() -> list[GpuReading]:
        raise NvmlUnavailable("no GPU here")

    text = Exporter(directory, Sampler(none)).text()
    return [re.sub(r'rank="\d+"', "rank=@", line, count=1) for line in text.splitlines() if 'rank="' in line]


def measure_fleet(lines: list[str], ranks: int, seconds: float) -> FleetCost:
    """Let a Prometheus scrape so many ranks and evaluate the rules for so long."""
    nodes = Nodes(lines)

    def answer(request: Request) -> Reply:
        node = int(request.path.rpartition("/")[2])
        return Reply(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", nodes.text(node).encode())

    targets = ranks // RANKS_PER_NODE
    server = Server("127.0.0.1", 0, answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "prometheus.yml"
        config.write_text(json.dumps(_configuration(server.server_port, targets)))  # JSON is YAML
        port = _free_port()
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={place}/data"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        process = subprocess.Popen(command)
        try:
            _wait(port)
            time.sleep(seconds / 2)
            before, began = _spent(port), time.monotonic()
            time.sleep(seconds / 2)
            cpu, samples = (late - early for late, early in zip(_spent(port), before, strict=True))
            took = time.monotonic() - began
            return FleetCost(
                ranks,
                targets,
                int(_own(port, "prometheus_tsdb_head_series")),
                samples / took,
                int(_own(port, "process_resident_memory_bytes")),
                cpu / took,
                _own(port, "prometheus_rule_group_last_duration_seconds"),
                _asked(port, "quantile(0.5, scrape_duration_seconds)"),
                seconds,
                _slowest(port),
            )
        finally:
            process.terminate()
            process.wait()
            server.shutdown()


def _configuration(port: int, targets: int) -> dict[str, object]:
    nodes = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"__metrics_path__": f"/node/{node}", "instance": f"node{node}"}}
        for node in range(targets)
    ]
    return {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "gpuwatch", "static_configs": nodes}],
    }


def _spent(port: int) -> tuple[float, float]:
    return _own(port, "process_cpu_seconds_total"), _own(port, "prometheus_tsdb_head_samples_appended_total")


def _own(port: int, name: str) -> float:
    """A metric of the server itself, summed over its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        found = re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", answer.read().decode())
    return sum(map(float, found))


def _asked(port: int, query: str) -> float:
    """A query's one number."""
    asked = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{asked}") as answer:
        result = json.load(answer)["data"]["result"]
    return float(result[0]["value"][1]) if result else float("nan")


def _slowest(port: int) -> list[tuple[str, float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/rules") as answer:
        groups = json.load(answer)["data"]["groups"]
    spent = [(str(rule["name"]), float(rule["evaluationTime"])) for group in groups for rule in group["rules"]]
    return sorted(spent, key=lambda pair: -pair[1])[:10]


def _wait(port: int) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready").close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _free_port() -> int:
    with Server("127.0.0.1", 0, lambda request: Reply(HTTPStatus.OK)) as server:
        return server.server_port
