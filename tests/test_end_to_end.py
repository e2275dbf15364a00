"""End to end against the real servers: a slow rank reaches a webhook with its fix, and nothing is lost on the way.

The tests of this file tell one story and run in their order: a straggler, a daemon that is killed, a rank that is
killed. ``make e2e`` shows the timings.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.catalog import RANK_LAST_STEP, STEPS
from gpuwatch.reader import read_all
from gpuwatch.rulebook import RULES_BY_ID
from tests.cluster import Cluster, cluster
from tests.serving import ROOT, eventually

TOOLS = ("prometheus", "promtool", "prometheus-alertmanager")
pytestmark = [
    pytest.mark.debian,
    pytest.mark.e2e,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
]

GRAFANA = {"__rate_interval": "15s", "__interval": "1s", "__range": "1h"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, nvml_stub: Path) -> Iterator[Cluster]:
    """Two simulated GPUs, two ranks of which one is slow, the daemon, Prometheus, Alertmanager, a webhook."""
    directory = tmp_path_factory.mktemp("cluster")
    gpus = Path(shutil.copy(Path(__file__).parent / "nvmlstub" / "two_h100.conf", directory / "gpus.conf"))
    with cluster(directory, nvml_stub, gpus) as running:
        # Each test may be run alone, once more.
        eventually(lambda: running.value(f"count({STEPS.name} > 0)") == 2, 120)
        yield running


def told(stack: Cluster, rule: str, status: str, since: float, seconds: float = 120) -> tuple[float, dict[str, Any]]:
    """Wait for the webhook to be told; how long that took since then, and the alert."""
    eventually(lambda: stack.webhook.told(rule, status, since) is not None, seconds)
    found = stack.webhook.told(rule, status, since)
    assert found is not None
    return found[0] - since, found[1]


def test_a_slow_rank_reaches_the_webhook_with_its_phase_and_its_fix(stack: Cluster) -> None:
    seconds, alert = told(stack, "dist-straggler", "firing", time.monotonic())
    print(f"straggler at the webhook after {seconds:.1f} s")
    labels, annotations = alert["labels"], alert["annotations"]
    assert (labels["run"], labels["rank"], labels["phase"]) == ("end-to-end", "1", "forward")
    assert annotations["fix"].startswith(RULES_BY_ID["dist-straggler"].fix[:40])
    assert annotations["runbook_url"].endswith("/dist-straggler.md")


def test_every_variable_of_every_dashboard_finds_values(stack: Cluster) -> None:
    for path in sorted((ROOT / "dashboards" / "json").glob("*.json")):
        board = json.loads(path.read_text("utf-8"))
        for variable in board["templating"]["list"]:
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            if found:
                selector = substituted(found[1], board)
                what = f"label/{found[2]}/values"
                eventually(lambda what=what, selector=selector: stack.ask(what, **{"match[]": selector}))  # type: ignore[misc]


def test_every_panel_whose_metrics_exist_shows_something(stack: Cluster) -> None:
    eventually(lambda: (stack.value("count_over_time(gpuwatch_rank_up[1m])") or 0) >= 15)
    for path in sorted((ROOT / "dashboards" / "json").glob("*.json")):
        board = json.loads(path.read_text("utf-8"))
        queries = empty = absent = 0
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                queries += 1
                query = substituted(target["expr"], board)
                result = stack.ask("query_range", query=query, start=time.time() - 15, end=time.time(), step=1)[
                    "result"
                ]
                if result:
                    continue
                selectors = re.findall(r"gpuwatch_\w+\{[^}]*\}", query)
                missing = [selector for selector in selectors if stack.value(f"count({selector})") is None]
                absent += bool(missing)
                empty += not missing
                if not missing and not filters(query):
                    pytest.fail(f"{path.name}: {panel['title']} is empty, and all its metrics exist: {query}")
        print(
            f"{path.stem}: {queries} queries, {queries - absent - empty} with series, {absent} of metrics that a CPU "
            f"run has not, {empty} that show only what is wrong"
        )


def filters(query: str) -> bool:
    """Whether a query shows only what is wrong: it may well be empty."""
    return "ALERTS" in query or bool(re.search(r"(?:[<>]=?|==) ?[\d.]|rule=|cause", query))


def substituted(text: str, board: dict[str, Any]) -> str:
    """A text of a dashboard with everything chosen."""
    chosen = {variable["name"]: variable.get("allValue", "any") for variable in board["templating"]["list"]}
    return re.sub(r"\$\{?(\w+)\}?", lambda found: {**GRAFANA, **chosen}[found[1]], text)


def test_a_daemon_that_is_killed_and_started_again_loses_nothing(stack: Cluster) -> None:
    steps = f'{STEPS.name}{{rank="0"}}'
    eventually(lambda: stack.value(steps))
    before = stack.value(steps)
    assert before is not None and stack.daemon is not None
    stack.daemon.send_signal(signal.SIGKILL)
    stack.daemon.wait(60)
    eventually(lambda: stack.value('up{job="gpuwatch"}') == 0)
    began = time.monotonic()
    stack.start_daemon()
    eventually(lambda: stack.value('up{job="gpuwatch"}') == 1 and (stack.value(steps) or 0) > before)
    print(f"daemon back in Prometheus after {time.monotonic() - began:.1f} s")
    assert stack.value(f"resets({steps}[2m])") == 0
    assert {snapshot.rank for snapshot in read_all(stack.records)[0]} == {0, 1}


def test_the_alert_resolves_when_the_rank_is_slow_no_more(stack: Cluster) -> None:
    eventually(lambda: stack.value('ALERTS{rule="dist-straggler", alertstate="firing"}') == 1)
    began = time.monotonic()
    stack.slow.unlink()
    seconds, _ = told(stack, "dist-straggler", "resolved", began, 180)
    print(f"straggler resolved after {seconds:.1f} s")


def test_a_killed_rank_arrives_as_dead_with_its_exact_last_step(stack: Cluster) -> None:
    victim = stack.ranks[1]
    began = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    victim.wait(60)
    seconds, alert = told(stack, "run-dead", "firing", began)
    print(f"run-dead at the webhook after {seconds:.1f} s")
    assert alert["labels"]["rank"] == "1"
    (record,) = [snapshot for snapshot in read_all(stack.records)[0] if snapshot.rank == 1]
    assert not record.up and record.step > 0
    assert stack.value(f'{RANK_LAST_STEP.name}{{rank="1"}}') == record.step
