"""``gpuwatch stack``: what it writes, its checks by the real tools, and the real servers started from it once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwatch.cli import main
from gpuwatch.render.runbooks import RUNBOOKS
from gpuwatch.rulebook import RULES
from gpuwatch.stack import ALERTMANAGER, PROMETHEUS, RUNBOOK_PAGES, TARGETS, StackError, share, write_stack
from tests.serving import daemon, eventually, rank

ROOT = Path(__file__).resolve().parent.parent


def tools(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A stack as it is written."""
    write_stack(tmp_path / "stack")
    return tmp_path / "stack"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_command_writes_the_stack_and_says_how_to_start_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "a stack"
    assert main(["stack", str(directory), "--target", "node-1:9847", "--target", "[::1]:9847"]) == 0
    said = capsys.readouterr().out
    assert f"cd '{directory}'" in said and "docker compose up -d" in said and f"prometheus {PROMETHEUS}" in said
    assert load(directory / TARGETS) == [{"targets": ["node-1:9847", "[::1]:9847"]}]
    assert (directory / "README.md").read_text("utf-8").endswith(said.partition("\n\n")[2])
    count = re.match(r"wrote (\d+) files", said)
    assert count is not None and int(count[1]) == sum(path.is_file() for path in directory.rglob("*"))


def test_everything_that_the_package_has_is_there(stack: Path) -> None:
    data = share()
    assert {path.name for path in (stack / "grafana/dashboards").iterdir()} == {
        path.name for path in data.dashboards.glob("*.json")
    }
    assert {path.stem for path in (stack / "prometheus/runbooks").iterdir()} == {
        path.stem for path in (data.alerts / "runbooks").glob("*.md")
    }
    assert (stack / "prometheus/rules/gpuwatch.rules.yaml").is_file()


def test_links_to_runbooks_lead_to_pages_that_prometheus_serves(stack: Path) -> None:
    texts = [path.read_text("utf-8") for path in (*stack.rglob("*.json"), *stack.rglob("*.rules.yaml"))]
    assert not any(RUNBOOKS in text for text in texts)
    pages = {page for text in texts for page in re.findall(re.escape(RUNBOOK_PAGES) + r"([\w-]+\.md)", text)}
    assert len(pages) >= 40 and all((stack / "prometheus/runbooks" / page).is_file() for page in pages)
    assert f"--web.user-assets={(stack / 'prometheus/runbooks').relative_to(stack)}" in PROMETHEUS


def test_servers_in_containers_may_read_all_but_the_password(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_stack(tmp_path / "stack")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "stack").rglob("*") if path.is_file()}
    assert modes.pop(".env") == 0o600
    assert set(modes.values()) == {0o644}


def test_a_directory_with_something_in_it_is_left_alone_unless_forced(
    stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = stack / "alertmanager/alertmanager.yml"
    text, password = edited.read_text("utf-8"), (stack / ".env").read_text("utf-8")
    edited.write_text("mine", "utf-8")
    assert main(["stack", str(stack)]) == 2
    assert "is not empty; name another, or write over it with --force" in capsys.readouterr().err
    assert edited.read_text("utf-8") == "mine"
    assert main(["stack", str(stack), "--force"]) == 0
    assert edited.read_text("utf-8") == text and edited.with_name("alertmanager.yml~").read_text("utf-8") == "mine"
    assert (stack / ".env").read_text("utf-8") == password
    assert [path.name for path in stack.rglob("*~")] == ["alertmanager.yml~"]


@pytest.mark.parametrize("target", ["node", "node:port", "node:99999", "http://node:1", "a b:1", '"x:1', ":1"])
def test_a_target_that_is_no_address_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(StackError, match="expected HOST:PORT"):
        write_stack(tmp_path / "stack", [target])
    assert not (tmp_path / "stack").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["stack", str(tmp_path / "file")]) == 2
    assert main(["stack", str(tmp_path / "file" / "below")]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 2
    assert "is not a directory" in told.err and "Not a directory" in told.err


@pytest.mark.parametrize("where", ["--prefix", "--target"])
def test_a_wheel_brings_the_data_along(wheel: Path, tmp_path: Path, where: str) -> None:
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--ignore-installed",
    ]
    subprocess.run([*install, where, str(tmp_path / "there"), str(wheel)], check=True, capture_output=True)
    (package,) = (tmp_path / "there").rglob("gpuwatch/stack.py")
    script = "import gpuwatch.stack as s, gpuwatch.cli as c, sys; print(s.share().alerts); c.main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", script, "stack", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package.parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(str(tmp_path / "there")), done.stdout + done.stderr
    assert (tmp_path / "out/compose.yaml").is_file() and (tmp_path / "out/grafana/dashboards/training.json").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's wheel."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    directory = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(directory.glob("*.whl"))


# -- the compose file --------------------------------------------------------------------------------------------------


def test_images_are_pinned_and_name_no_registry(stack: Path) -> None:
    services = load(stack / "compose.yaml")["services"]
    assert set(services) == {"prometheus", "alertmanager", "grafana"}
    for service in services.values():
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])


def test_the_compose_file_is_as_its_specification_wants_it(stack: Path) -> None:
    specification = pytest.importorskip("compose_spec", reason="compose-spec is not installed")
    read = specification.PyCompose.from_yaml((stack / "compose.yaml").read_text("utf-8"))
    read.validate()
    assert sorted(read.service_names()) == ["alertmanager", "grafana", "prometheus"]


def test_a_container_mounts_what_is_there_and_listens_on_loopback_alone(stack: Path) -> None:
    compose = load(stack / "compose.yaml")
    for name, service in compose["services"].items():
        assert service["network_mode"] == "host" and "ports" not in service
        for source, _, _ in (volume.partition(":") for volume in service["volumes"]):
            assert (stack / source).is_dir() if source.startswith(".") else source in compose["volumes"], source
        said = " ".join(service.get("command", [])) + str(service.get("environment", {}).get("GF_SERVER_HTTP_ADDR"))
        assert "127.0.0.1" in said, name


@pytest.mark.parametrize(("name", "bare"), [("prometheus", PROMETHEUS), ("alertmanager", ALERTMANAGER)])
def test_with_and_without_containers_the_servers_get_the_same_options(stack: Path, name: str, bare: str) -> None:
    command = load(stack / "compose.yaml")["services"][name]["command"]
    options = {word.partition("=")[0] for word in command} - {"--storage.tsdb.retention.time"}
    assert options == {word.partition("=")[0] for word in shlex.split(bare)}
    assert [word for word in command if "listen-address" in word] == [
        word for word in shlex.split(bare) if "listen-address" in word
    ]


def test_grafana_asks_where_the_others_listen(stack: Path) -> None:
    sources = load(stack / "grafana/provisioning/datasources/gpuwatch.yml")["datasources"]
    listening = {word.partition("=")[2] for word in shlex.split(f"{PROMETHEUS} {ALERTMANAGER}") if "web.listen" in word}
    assert {source["url"].removeprefix("http://") for source in sources} == listening
    (provider,) = load(stack / "grafana/provisioning/dashboards/gpuwatch.yml")["providers"]
    variable = provider["options"]["path"].removeprefix("$")
    mounted = load(stack / "compose.yaml")["services"]["grafana"]
    assert f"./grafana/dashboards:{mounted['environment'][variable]}:ro" in mounted["volumes"]
    assert f"{variable}=$PWD/grafana/dashboards" in (stack / "README.md").read_text("utf-8")


# -- the real tools and servers ----------------------------------------------------------------------------------------


@pytest.mark.debian
@tools("promtool", "amtool")
def test_the_servers_own_tools_accept_the_configurations(stack: Path) -> None:
    for command in (
        ["promtool", "check", "config", "prometheus/prometheus.yml"],
        ["amtool", "check-config", "alertmanager/alertmanager.yml"],
    ):
        done = subprocess.run(command, cwd=stack, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


@pytest.mark.debian
@tools("amtool")
@pytest.mark.parametrize(("severity", "receiver"), [("critical", "team"), ("warning", "team"), ("info", "quiet")])
def test_what_can_wait_goes_to_a_receiver_of_its_own(stack: Path, severity: str, receiver: str) -> None:
    command = ["amtool", "config", "routes", "test", "--config.file=alertmanager/alertmanager.yml"]
    done = subprocess.run(
        [*command, f"severity={severity}", "rule=data-stall"], cwd=stack, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == receiver


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def ask(port: int, path: str, body: object = None) -> Any:
    """A server's answer to a GET, or to a POST of JSON; None while it does not answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return None
    return json.loads(text) if text.startswith(("{", "[")) else text


@contextlib.contextmanager
def started(directory: Path, program: str, options: str, port: int) -> Iterator[None]:
    """A server with the options that the stack names, but on another port; ended with the block."""
    words = [re.sub(r"(web\.listen-address=127\.0\.0\.1):\d+", rf"\g<1>:{port}", word) for word in shlex.split(options)]
    log = directory / f"{program}.log"
    with log.open("wb") as output:
        process = subprocess.Popen([program, *words], cwd=directory, stdout=output, stderr=output)
        try:
            eventually(lambda: ask(port, "/-/ready") is not None or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.kill()
            process.wait()


@pytest.mark.debian
@tools("prometheus", "prometheus-alertmanager")
def test_a_killed_rank_pages_once_through_the_servers_that_the_stack_starts(tmp_path: Path) -> None:
    records, stack = tmp_path / "records", tmp_path / "stack"
    prometheus, alertmanager = free_port(), free_port()
    with rank(records, name="job-7", rank=3, world_size=4) as training, daemon(records) as node:
        write_stack(stack, [f"127.0.0.1:{node.port}"])
        config = stack / "prometheus/prometheus.yml"
        faster = config.read_text("utf-8").replace("15s", "1s").replace(":9093", f":{alertmanager}")
        config.write_text(faster, "utf-8")
        training.kill()
        training.wait()
        with (
            started(stack, "prometheus-alertmanager", ALERTMANAGER, alertmanager),
            started(stack, "prometheus", PROMETHEUS, prometheus),
        ):
            died = {"rule": "run-dead", "run": "job-7", "rank": "3"}
            eventually(lambda: _alerts(alertmanager, **died))
            (alert,) = _alerts(alertmanager, **died)
            assert alert["labels"]["severity"] == "critical"
            assert alert["annotations"]["fix"] == next(rule.fix for rule in RULES if rule.id == "run-dead")
            page = alert["annotations"]["runbook_url"].partition("9090")[2]
            assert ask(prometheus, page).startswith("# The training process is gone")
            # What merely follows from it is muted, on the other ranks of this run too, and in no other run.
            others = [
                {"labels": {"alertname": "GpuwatchDataStall", "rule": "data-stall", "run": run, "rank": "2"}}
                for run in ("job-7", "job-8")
            ]
            ask(alertmanager, "/api/v2/alerts", others)
            eventually(lambda: len(_alerts(alertmanager, rule="data-stall")) == 2)
            found = _alerts(alertmanager, rule="data-stall")
            muted = {each["labels"]["run"]: each["status"]["inhibitedBy"] for each in found}
            assert muted == {"job-7": [alert["fingerprint"]], "job-8": []}
            assert ask(prometheus, "/api/v1/rules")["status"] == "success"
            (target,) = ask(prometheus, "/api/v1/targets")["data"]["activeTargets"]
            assert target["health"] == "up" and target["labels"]["job"] == "gpuwatch"


def _alerts(port: int, **labels: str) -> list[Any]:
    found = ask(port, "/api/v2/alerts") or []
    return [alert for alert in found if labels.items() <= alert["labels"].items()]
