"""The dashboards' queries and variables against a real Prometheus with the whole catalog."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
import yaml
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpuwatch import catalog
from gpuwatch.expr import Metric as CatalogMetric
from gpuwatch.render.alerts import alert_rules
from gpuwatch.rulebook import RULES
from tests.boardpanels import BOARDS, TARGETS, Json, every_board, every_target

GRAFANA = {"__rate_interval": "5s", "__interval": "1s", "__range": "1h"}
needs_prometheus = [
    pytest.mark.debian,
    pytest.mark.skipif(
        shutil.which("promtool") is None or shutil.which("prometheus") is None, reason="prometheus is not installed"
    ),
]


def substituted(text: str, values: dict[str, str]) -> str:
    """A text with Grafana's variables filled in; an undefined one is an error."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], text)


def everything() -> dict[str, str]:
    """Grafana's variables as they are when everything is chosen."""
    variables = [variable for board in BOARDS for variable in board["templating"]["list"]]
    chosen = {variable["name"]: variable.get("allValue", "any") for variable in variables}
    return {**GRAFANA, **chosen}


@pytest.mark.debian
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_reads_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{index}", "expr": substituted(target["expr"], everything())}
        for index, (_, target) in enumerate(TARGETS)
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TARGETS)} rules found" in done.stdout


CHOICES: dict[str, tuple[str, ...]] = {
    "phase": catalog.PHASES,
    "part": (*catalog.MEMORY_PARTS, "items", "collate", "copy", "communication", "overlap"),
    "state": ("enqueued", "completed"),
    "quantile": ("0.5", "0.99"),
    "reason": tuple(catalog.CLOCK_REASONS),
    "source": ("records", "nvml"),
    "rule": ("leak-graph-retained",),
    "where": ("train.py:41",),
}
"""Values of the metrics' own labels."""


class EverythingPublished(Collector):
    """Every metric of the catalog, with values that move as those of a run do: a stand-in for the exporter."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        age = time.monotonic() - self.started
        for metric in catalog.METRICS.values():
            if metric not in catalog.EARLIER:
                yield self._family(metric, age)

    def _family(self, metric: CatalogMetric, age: float) -> Metric:
        labels = (*catalog.SCOPES[metric.scope], *metric.labels)
        owners: dict[str, list[tuple[str, ...]]] = {
            "rank": [("r1", "0"), ("r1", "1")],
            "gpu": [("0", "GPU-0"), ("1", "GPU-1")],
            "node": [()],
        }
        own = list(itertools.product(*(CHOICES.get(label, ("x",)) for label in metric.labels)))
        values = [(*owner, *choice) for owner in owners[metric.scope] for choice in own]
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            buckets = [(str(bound), age * min(1.0, bound)) for bound in catalog.STEP_BOUNDS] + [("+Inf", age)]
            for value in values:
                histogram.add_metric(value, buckets, age)
            return histogram
        family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
            metric.name, metric.help, labels=labels
        )
        for value in values:
            family.add_metric(value, self._number(metric, value, age))
        return family

    def _number(self, metric: CatalogMetric, labels: tuple[str, ...], age: float) -> float:
        if metric.kind == "counter":
            return 10 * age
        if metric in (catalog.OWN_SECONDS, catalog.OWN_STEP_SECONDS):
            return 2.0 if labels[1] == "1" else 1.0  # one rank is slow
        if metric == catalog.OBSERVATION:
            return 200.0
        if metric == catalog.GPU_UTILIZATION:
            return 0.02 if labels[0] == "1" else 1.0  # one GPU does nothing
        if metric == catalog.SOURCE_UP:
            return float("nvml" not in labels)
        return 1.0


class Quiet(WSGIRequestHandler):
    """A request handler that writes no log."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """A real Prometheus over HTTP."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **arguments: str | float) -> Any:
        url = f"{self.address}{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:
                    raise ConnectionError("not ready yet") from error
                raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    def wait_for(self, query: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.ask("query", query=query)["result"]:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.2)
        raise AssertionError(f"{query} has no result after {seconds} s")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with our rules, scraping every second a server that publishes the whole catalog."""
    directory = tmp_path_factory.mktemp("prometheus")
    registry = CollectorRegistry()
    registry.register(EverythingPublished())
    server = make_server("127.0.0.1", 0, make_wsgi_app(registry), handler_class=Quiet)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    (directory / "rules.yaml").write_text(alert_rules(RULES), encoding="utf-8")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "900ms", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {"job_name": "gpuwatch", "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        ready = Prometheus(port)
        ready.wait_for(f"count_over_time({catalog.RANK_UP.name}[1m]) >= 4")
        ready.wait_for('ALERTS{alertstate="firing"}')
        yield ready
    finally:
        process.terminate()
        process.wait(10)
        server.shutdown()
        serving.join(5)
        server.server_close()


class TestAgainstPrometheus:
    pytestmark = needs_prometheus

    def test_every_metric_of_the_catalog_arrived(self, prometheus: Prometheus) -> None:
        stored = set(prometheus.ask("label/__name__/values"))
        for metric in catalog.METRICS.values():
            if metric in catalog.EARLIER:
                continue  # there are no earlier runs here
            assert (f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name) in stored

    @every_board
    def test_every_variable_finds_values(self, board: Json, prometheus: Prometheus) -> None:
        for variable in board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert found
            selector = substituted(found[1], everything())
            assert prometheus.ask(f"label/{found[2]}/values", **{"match[]": selector}), variable["name"]

    @every_target
    def test_every_query_returns_series_that_its_legend_can_name(
        self, title: str, target: Json, prometheus: Prometheus
    ) -> None:
        now = time.time()
        query = substituted(target["expr"], everything())
        result = prometheus.ask("query_range", query=query, start=now - 30, end=now, step=1)["result"]
        assert result, f"{title}: no series for {query}"
        for label in re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]):
            assert any(label in series["metric"] for series in result), f"{title}: no series has a {label}"
        values = [float(value) for series in result for _, value in series["values"]]
        assert all(abs(value) < 1e15 for value in values), f"{title}: infinite or not a number"
