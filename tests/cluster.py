"""A whole stack on the loopback address: simulated GPUs, ranks, the daemon, Prometheus, Alertmanager and a webhook.

What is configured is what ``gpuwatch stack`` writes; only intervals, holds and addresses are those of a test.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from gpuwatch.stack import write_stack
from tests.serving import ROOT, environment, eventually

RANK = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import gpuwatch

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, slow = dist.get_rank(), sys.argv[1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, inputs):
        if rank == 1 and os.path.exists(slow):
            time.sleep(0.02)
        return self.layers(inputs)


torch.manual_seed(0)
model = DistributedDataParallel(Model())
loader = DataLoader(TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1)), 16)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
gpuwatch.attach(model, loader, name="end-to-end")
while True:
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.005)
"""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Webhook:
    """What Alertmanager sends, as (seconds of the clock, message)."""

    def __init__(self) -> None:
        self.received: list[tuple[float, dict[str, Any]]] = []
        received = self.received

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                received.append((time.monotonic(), body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server.server_address[1])

    def told(self, rule: str, status: str, since: float) -> tuple[float, dict[str, Any]] | None:
        """The first alert of this rule that came since then with this status, and when; None before it came."""
        for when, message in self.received:
            for alert in message["alerts"]:
                if when >= since and alert["labels"].get("rule") == rule and alert["status"] == status:
                    return when, alert
        return None

    def stop(self) -> None:
        """Listen no more."""
        self.server.shutdown()
        self.thread.join(5)
        self.server.server_close()


class Cluster:
    """Everything that runs; processes end with :func:`cluster`'s block."""

    def __init__(self, directory: Path, nvml_stub: Path, gpus: Path) -> None:
        self.directory = directory
        self.records = directory / "records"
        self.records.mkdir()
        self.slow = directory / "slow"
        self.slow.touch()
        self.webhook = Webhook()
        self.daemon_port, self.prometheus_port, self.alertmanager_port = free_port(), free_port(), free_port()
        self.environment = environment(
            GPUWATCH_DIR=str(self.records),
            GPUWATCH_DAEMON="0",
            GPUWATCH_QUIET="1",
            PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "hooks")]),
            LD_LIBRARY_PATH=str(nvml_stub.parent),
            NVMLSTUB_CONF=str(gpus),
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.daemon: subprocess.Popen[bytes] | None = None

    # -- starting ------------------------------------------------------------------------------------------------------

    def start_daemon(self) -> None:
        """``gpuwatch serve``, as a service would start it."""
        listen = f"127.0.0.1:{self.daemon_port}"
        self.daemon = self._run("daemon", sys.executable, "-m", "gpuwatch", "serve", "--listen", listen)
        eventually(lambda: self._answers(f"http://{listen}/-/ready"))

    def start_ranks(self) -> None:
        """Two ranks that train together; rank 1 is slow in its forward while the file ``slow`` is there."""
        program = self.directory / "train.py"
        program.write_text(RANK, encoding="utf-8")
        world = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        for rank in range(2):
            own = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank), "GPUWATCH_JOB_ID": "job-7"}
            self.ranks.append(self._run(f"rank{rank}", sys.executable, str(program), str(self.slow), environment=own))

    def start_servers(self) -> None:
        """Prometheus and Alertmanager on the configuration that ``gpuwatch stack`` writes."""
        stack = self.directory / "stack"
        write_stack(stack, [f"127.0.0.1:{self.daemon_port}"])
        self._hasten(stack)
        self._run(
            "prometheus", "prometheus", f"--config.file={stack}/prometheus/prometheus.yml",
            f"--storage.tsdb.path={self.directory}/tsdb", f"--web.listen-address=127.0.0.1:{self.prometheus_port}",
        )  # fmt: skip
        self._run(
            "alertmanager", "prometheus-alertmanager", f"--config.file={stack}/alertmanager/alertmanager.yml",
            f"--storage.path={self.directory}/alertmanager", "--cluster.listen-address=",
            f"--web.listen-address=127.0.0.1:{self.alertmanager_port}",
        )  # fmt: skip
        for port in (self.prometheus_port, self.alertmanager_port):
            eventually(lambda port=port: self._answers(f"http://127.0.0.1:{port}/-/ready"))  # type: ignore[misc]

    def _hasten(self, stack: Path) -> None:
        """A second instead of minutes, and the webhook as the receiver."""
        prometheus = stack / "prometheus" / "prometheus.yml"
        config = yaml.safe_load(prometheus.read_text("utf-8"))
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{self.alertmanager_port}"]
        prometheus.write_text(yaml.safe_dump(config), "utf-8")
        for rules in (stack / "prometheus" / "rules").glob("*.yaml"):
            rules.write_text(re.sub(r"for: \d+m", "for: 2s", rules.read_text("utf-8")), "utf-8")
        alertmanager = stack / "alertmanager" / "alertmanager.yml"
        config = yaml.safe_load(alertmanager.read_text("utf-8"))
        config["route"] |= {"group_wait": "0s", "group_interval": "1s"}
        hook = {"url": f"http://127.0.0.1:{self.webhook.port}/", "send_resolved": True}
        for receiver in config["receivers"]:
            receiver["webhook_configs"] = [hook]
        alertmanager.write_text(yaml.safe_dump(config), "utf-8")

    def _run(self, name: str, *command: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**self.environment, **(environment or {})},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    # -- asking --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _answers(url: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            return int(answer.status) == 200
        return False

    def ask(self, path: str, **arguments: str | float) -> Any:
        """What Prometheus answers."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}?{urllib.parse.urlencode(arguments, doseq=True)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float | None:
        """The number a query comes to now; None without a series."""
        result = self.ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    def stop(self) -> None:
        """End everything."""
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(60)
        self.webhook.stop()


@contextlib.contextmanager
def cluster(directory: Path, nvml_stub: Path, gpus: Path) -> Iterator[Cluster]:
    """The stack, everything up and the run under way."""
    running = Cluster(directory, nvml_stub, gpus)
    try:
        running.start_ranks()
        running.start_daemon()
        running.start_servers()
        yield running
    finally:
        running.stop()
