"""The dashboards: their layout, their queries, and their data from a real Prometheus."""

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

from dashboards import boards
from dashboards.normalise import normalised
from gpuwatch import catalog
from gpuwatch.expr import Metric as CatalogMetric
from gpuwatch.render.alerts import alert_rules
from gpuwatch.render.conditions import limit
from gpuwatch.rulebook import RULES, RULES_BY_ID

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
BOARDS: list[Json] = [json.loads(draw()) for draw in boards.BOARDS.values()]
PANELS: list[Json] = [panel for board in BOARDS for panel in board["panels"] if panel["type"] != "row"]
TARGETS: list[tuple[str, Json]] = [
    (f"{board['uid'].removeprefix('gpuwatch-')}: {panel['title']}", target)
    for board in BOARDS
    for panel in board["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]
VARIABLES = {
    "gpuwatch-training": ["datasource", "job", "run", "rank", "runbooks"],
    "gpuwatch-memory": ["datasource", "job", "run", "rank", "runbooks"],
    "gpuwatch-data": ["datasource", "job", "run", "rank", "runbooks"],
    "gpuwatch-ranks": ["datasource", "job", "run", "rank", "runbooks"],
    "gpuwatch-hardware": ["datasource", "job", "node", "gpu", "runbooks"],
    "gpuwatch-fleet": ["datasource", "job", "run", "node", "gpu", "runbooks"],
}
BY_RANK = ("training", "memory", "data")
"""Dashboards on the chosen ranks, in which every query is narrowed to them."""
every_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
SUFFIXES = ("_bucket", "_sum", "_count")
JOINED = {"job", "instance", "le"}
"""Labels of every series beside the catalog's: the scrape's, and a histogram's."""

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


# -- layout and form ---------------------------------------------------------------------------------------------------


@every_board
def test_no_panel_leaves_the_grid_or_covers_another(board: Json) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"{one} covers {other}"


@every_board
def test_ids_and_titles_are_unique(board: Json) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_says_what_it_shows_and_in_which_unit(panel: Json) -> None:
    assert panel["title"] and panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title} {target['refId']}" for title, target in TARGETS])
def test_every_query_is_narrowed_by_the_variables(title: str, target: Json) -> None:
    expr = target["expr"]
    assert target["legendFormat"]
    assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for selector in re.findall(r"(?:gpuwatch_[\w:]+|ALERTS)(\{[^}]*\})?", expr):
        assert 'job=~"$job"' in selector, f"{title}: {expr}"
    if title.startswith(BY_RANK):
        assert 'run=~"$run"' in expr and 'rank=~"$rank"' in expr
    assert not re.search(r"\$__interval\b", expr)
    for inside in re.findall(r"(?:rate|increase)\([^\[]*\[([^\]]+)\]", expr):
        assert inside in ("$__rate_interval", "$__range", "5m"), f"{title}: a rate over {inside}"


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title} {target['refId']}" for title, target in TARGETS])
def test_every_query_reads_metrics_of_the_catalog_with_labels_they_have(title: str, target: Json) -> None:
    selectors = re.findall(r"\b(gpuwatch_\w+)\{([^}]*)\}", target["expr"])
    assert selectors or "ALERTS" in target["expr"]
    for name, inside in selectors:
        base = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
        metric = catalog.METRICS.get(name) or catalog.METRICS[base]
        known = {*catalog.SCOPES[metric.scope], *metric.labels, *JOINED}
        assert {part.partition("=")[0].strip("~! ") for part in inside.split(",")} <= known, f"{title}: {inside}"
    counters = {name for name, _ in selectors if name.endswith(("_total", *SUFFIXES))}
    for name in counters - _raw_counters():
        assert re.search(rf"(rate|increase)\({name}", target["expr"]), (
            f"{title}: the counter {name} is shown without a rate"
        )


def _raw_counters() -> set[str]:
    # Shares of whole runs, how far ranks are apart, and what is rare and lasts are read as totals.
    whole = RULES_BY_ID["data-epoch-restart"].when.metrics()
    rare = (catalog.GUARD_FAULTS, catalog.GPU_REMAPPED_ROWS, catalog.GPU_GRAVE_ERRORS, catalog.WORKER_DEATHS)
    return {*whole, catalog.COLLECTIVES.name, *(metric.name for metric in rare)}


def test_the_limits_on_a_panel_are_those_of_its_rule() -> None:
    rule = RULES_BY_ID["data-stall"]
    panel = next(panel for panel in PANELS if f"({rule.id})" in panel["description"])
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert rule.critical_when is not None
    drawn = [(step["value"], step["color"]) for step in steps]
    assert drawn == [
        (None, "green"),
        (limit(rule.when, rule.value.expr), "orange"),
        (limit(rule.critical_when, rule.value.expr), "red"),
    ]
    assert panel["links"][0]["url"] == "${runbooks}data-stall.md"


@every_board
def test_every_linked_runbook_exists(board: Json) -> None:
    linked = re.findall(r"\$\{runbooks\}([a-z0-9-]+)\.md", json.dumps(board))
    assert linked
    assert all((ROOT / "alerts" / "runbooks" / f"{id}.md").is_file() for id in linked)


def test_the_dashboards_keep_their_addresses() -> None:
    assert [board["uid"] for board in BOARDS] == list(VARIABLES)


@every_board
def test_a_dashboard_is_of_todays_schema(board: Json) -> None:
    assert board["schemaVersion"] == 39
    assert not {"rows", "style", "hideControls", "sharedCrosshair", "__inputs"} & board.keys()
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == VARIABLES[board["uid"]]
    for variable in board["templating"]["list"][1:-1]:
        assert variable["multi"] and variable["includeAll"] and variable["allValue"] == ".+"


def test_the_capacity_is_a_line_across_the_stack() -> None:
    panel = next(panel for panel in PANELS if panel["title"] == "What the device's memory is used for")
    (override,) = panel["fieldConfig"]["overrides"]
    target = next(target for target in panel["targets"] if target["refId"] == override["matcher"]["options"])
    assert "capacity" in target["expr"]
    assert {"id": "custom.stacking", "value": {"mode": "none", "group": "A"}} in override["properties"]


def test_an_unknown_kind_of_panel_is_refused() -> None:
    board = {"panels": [{"type": "graph"}], "templating": {"list": []}}
    with pytest.raises(ValueError, match="unknown kind of panel 'graph'"):
        normalised(board)


# -- against the real thing --------------------------------------------------------------------------------------------


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
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:
                    raise ConnectionError("not ready yet") from error
                raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    def wait_for(self, query: str, seconds: float = 30) -> None:
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

    @pytest.mark.parametrize(
        ("title", "target"), TARGETS, ids=[f"{title} {target['refId']}" for title, target in TARGETS]
    )
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
