"""What a fleet installs: units, manifests, scripts and configurations, checked by their own tools where these are."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwatch.config import DEFAULT_PORT, KEPT_RECORDS, SERVICE_DIRECTORY
from gpuwatch.reader import read_all
from gpuwatch.render.alertmanager import alertmanager_config, shared_labels
from gpuwatch.rulebook import RULES, RULES_BY_ID
from gpuwatch.version import __version__
from tests.children import in_child
from tests.recorded import write_run

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sh"))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as several users")


def tool(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")


def said_by(*command: str | Path) -> str:
    """What a tool that must succeed says."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- the service -------------------------------------------------------------------------------------------------------


@pytest.mark.debian
@tool("systemd-analyze")
def test_systemd_accepts_the_unit_and_finds_little_exposed(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "gpuwatch.service").read_text().replace("/opt/gpuwatch/bin/gpuwatch", "/bin/true")
    (tmp_path / "gpuwatch.service").write_text(unit)
    assert said_by("systemd-analyze", "verify", tmp_path / "gpuwatch.service") == ""
    judged = said_by("systemd-analyze", "security", "--offline=true", "--no-pager", tmp_path / "gpuwatch.service")
    level = re.search(r"Overall exposure level for gpuwatch\.service: (\d+\.\d)", judged)
    assert level is not None and float(level[1]) < 3


def test_the_unit_and_its_tmpfiles_entry_agree_on_the_directory_and_its_mode() -> None:
    unit = (DEPLOY / "systemd" / "gpuwatch.service").read_text()
    entry = (DEPLOY / "systemd" / "gpuwatch.tmpfiles.conf").read_text()
    mode = re.search(r"^RuntimeDirectoryMode=(\d+)$", unit, re.MULTILINE)
    assert mode is not None and f"d {SERVICE_DIRECTORY} {mode[1]} gpuwatch gpuwatch" in entry
    assert f"--dir {SERVICE_DIRECTORY}" in unit and f":{DEFAULT_PORT}" in unit
    assert "RuntimeDirectoryPreserve=yes" in unit  # or a restart would remove the records of living runs


@needs_root
@tool("systemd-tmpfiles")
def test_in_the_directory_everybody_writes_and_only_the_daemon_reads(tmp_path: Path) -> None:
    # With numbers for the user's name, and below a directory that every user can enter.
    root = Path("/tmp") / f"gpuwatch-test-{os.getpid()}"
    root.mkdir(mode=0o755)
    try:
        entry = (DEPLOY / "systemd" / "gpuwatch.tmpfiles.conf").read_text()
        conf = tmp_path / "entry.conf"
        conf.write_text(entry.replace("gpuwatch gpuwatch", "12000 12000").replace("/run/", f"{root}/"))
        said_by("systemd-tmpfiles", "--create", conf)
        directory = root / "gpuwatch"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o3733
        record = in_child(lambda: write_run(directory, "mine").path, uid=12001)
        assert stat.S_IMODE(os.stat(record).st_mode) == 0o640 and os.stat(record).st_gid == 12000
        hidden = in_child(lambda: (os.umask(0o077), write_run(directory, "careful").path)[1], uid=12001)
        assert stat.S_IMODE(os.stat(hidden).st_mode) == 0o640
        assert in_child(lambda: [run.run for run in read_all(directory)[0]], uid=12000) == "['mine', 'careful']"
        assert in_child(lambda: read_all(directory), uid=12002).startswith("PermissionError")
        assert in_child(lambda: Path(record).read_bytes(), uid=12002).startswith("PermissionError")
        assert in_child(lambda: Path(record).unlink(), uid=12002).startswith("PermissionError")
        assert in_child(lambda: (directory / "daemon.json").unlink(), uid=12002).startswith("PermissionError")
        assert in_child(lambda: Path(record).unlink(), uid=12000) == "None"
    finally:
        shutil.rmtree(root)


# -- Slurm -------------------------------------------------------------------------------------------------------------


@pytest.mark.debian
@tool("shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    assert said_by("shellcheck", script) == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_never_fails_and_hardly_waits_where_nothing_is_as_expected(script: Path, tmp_path: Path) -> None:
    assert os.access(script, os.X_OK)
    commands = tools(tmp_path, systemctl="exit 1", install="exit 1", pgrep="exit 3", setsid="exit 1")
    begin = time.monotonic()
    done = slurm(script, commands, GPUWATCH_DIR=str(tmp_path / "missing"), SLURM_JOB_UID="12345")
    assert done.returncode == 0 and done.stderr == ""
    assert time.monotonic() - begin < 20


def tools(directory: Path, **scripts: str) -> Path:
    """A directory of commands that stand in for the node's; each call is written down in ``said``."""
    commands = directory / "commands"
    commands.mkdir()
    for name, text in scripts.items():
        (commands / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {directory}/said\n{text}\n')
        (commands / name).chmod(0o755)
    return commands


def slurm(script: Path, commands: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{commands}:{os.environ['PATH']}"
    return subprocess.run(
        [script], env={"PATH": path, **environment}, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_prolog_starts_the_service_where_there_is_one(tmp_path: Path) -> None:
    commands = tools(tmp_path, systemctl="exit 0", setsid="exit 0")
    slurm(DEPLOY / "slurm" / "prolog.sh", commands, GPUWATCH_DIR=str(tmp_path))
    said = (tmp_path / "said").read_text()
    assert "systemctl start --no-block gpuwatch.service" in said and "setsid" not in said


def test_the_prolog_starts_a_daemon_of_its_own_where_there_is_no_service(tmp_path: Path) -> None:
    commands = tools(tmp_path, systemctl="exit 1", setsid="exit 0", install='exec /usr/bin/install -d -m 700 "$8"')
    directory = tmp_path / "records"
    environment = {"GPUWATCH_DIR": str(directory), "GPUWATCH_COMMAND": sys.executable, "GPUWATCH_LISTEN": "[::1]:9"}
    slurm(DEPLOY / "slurm" / "prolog.sh", commands, **environment)
    deadline = time.monotonic() + 60
    while "setsid" not in (tmp_path / "said").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    said = (tmp_path / "said").read_text()
    assert f"install -d -o gpuwatch -g gpuwatch -m 3733 {directory}" in said
    assert f"serve --listen [::1]:9 --dir {directory}" in said


def test_the_task_prolog_exports_what_a_task_needs(tmp_path: Path) -> None:
    done = slurm(DEPLOY / "slurm" / "task-prolog.sh", tools(tmp_path))
    assert done.stdout.splitlines() == [f"export GPUWATCH_DIR={SERVICE_DIRECTORY}", "export GPUWATCH_DAEMON=0"]


def old_records(directory: Path, count: int) -> list[Path]:
    """Files that pass for records, oldest first, each with a snapshot; one has a newline in its name."""
    directory.mkdir()
    found = []
    for index in range(count):
        record = directory / (f"run-{index}\nforeign.gpw" if index == 0 else f"run-{index}.gpw")
        for path in (record, record.with_suffix(".pickle")):
            path.touch()
            os.utime(path, (1e9 + index, 1e9 + index))
        found.append(record)
    return found


def test_the_epilog_keeps_the_newest_records_of_a_user_who_is_gone(tmp_path: Path) -> None:
    records = tmp_path / "records"
    oldest, second, *rest = old_records(records, 5)
    foreign = records / "foreign.gpw"
    foreign.touch()
    environment = {"GPUWATCH_DIR": str(records), "GPUWATCH_KEPT_RECORDS": "4", "SLURM_JOB_UID": str(os.geteuid())}
    slurm(DEPLOY / "slurm" / "epilog.sh", tools(tmp_path, pgrep="exit 1"), **environment)
    gone = {oldest, second, oldest.with_suffix(".pickle"), second.with_suffix(".pickle")}
    assert {path for path in gone if path.exists()} == set()
    assert foreign.exists() and all(path.exists() and path.with_suffix(".pickle").exists() for path in rest)


@pytest.mark.parametrize(
    ("pgrep", "uid"), [("exit 0", os.geteuid()), ("exit 2", os.geteuid()), ("exit 1", os.geteuid() + 1)]
)
def test_the_epilog_leaves_the_records_of_users_who_are_not_gone_and_of_others(
    tmp_path: Path, pgrep: str, uid: int
) -> None:
    found = old_records(tmp_path / "records", 3)
    environment = {"GPUWATCH_DIR": str(tmp_path / "records"), "GPUWATCH_KEPT_RECORDS": "1", "SLURM_JOB_UID": str(uid)}
    slurm(DEPLOY / "slurm" / "epilog.sh", tools(tmp_path, pgrep=pgrep), **environment)
    assert all(path.exists() for path in found)


def test_the_epilog_keeps_as_many_as_attach_does() -> None:
    assert f"GPUWATCH_KEPT_RECORDS:-{KEPT_RECORDS}}}" in (DEPLOY / "slurm" / "epilog.sh").read_text()


# -- Kubernetes --------------------------------------------------------------------------------------------------------

Shape = Mapping[str, Any]
"""Fields of an object as the API has them: a mapping of its own, ``[shape]`` for a list of such, None for any value."""

_MOUNTS: Shape = {"name": None, "mountPath": None}
_PROBE: Shape = {"httpGet": {"path": None, "port": None}, "periodSeconds": None, "timeoutSeconds": None}
_SECURITY: Shape = {
    **dict.fromkeys(("runAsUser", "runAsGroup", "runAsNonRoot", "allowPrivilegeEscalation", "readOnlyRootFilesystem")),
    "capabilities": {"drop": None, "add": None},
}
_CONTAINER: Shape = {
    **dict.fromkeys(("name", "image", "command", "args", "restartPolicy")),
    "env": [{"name": None, "value": None, "valueFrom": {"fieldRef": {"fieldPath": None}}}],
    "ports": [{"name": None, "containerPort": None}],
    "lifecycle": {"preStop": {"exec": {"command": None}}},
    "livenessProbe": _PROBE,
    "readinessProbe": _PROBE,
    "resources": {"requests": {"cpu": None, "memory": None}, "limits": {"memory": None, "nvidia.com/gpu": None}},
    "securityContext": _SECURITY,
    "volumeMounts": [_MOUNTS],
}
_LABELS: Shape = {"app": None, "app.kubernetes.io/name": None}
_POD: Shape = {
    "metadata": {"labels": _LABELS},
    "spec": {
        **dict.fromkeys(("restartPolicy", "automountServiceAccountToken", "terminationGracePeriodSeconds")),
        **dict.fromkeys(("runtimeClassName", "nodeSelector")),
        "tolerations": [{"operator": None}],
        "securityContext": {
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup")),
            "seccompProfile": {"type": None},
        },
        "initContainers": [_CONTAINER],
        "containers": [_CONTAINER],
        "volumes": [
            {"name": None, "hostPath": {"path": None, "type": None}, "emptyDir": {"medium": None, "sizeLimit": None}}
        ],
    },
}
_HEAD: Shape = {"apiVersion": None, "kind": None, "metadata": {"name": None, "labels": _LABELS}}
_RELABELING: Shape = dict.fromkeys(("sourceLabels", "separator", "regex", "targetLabel", "replacement", "action"))
_RULE: Shape = dict.fromkeys(("alert", "record", "expr", "for", "labels", "annotations"))
SHAPES: Mapping[str, Shape] = {
    "daemonset.yaml": {
        **_HEAD,
        "spec": {
            "selector": {"matchLabels": _LABELS},
            "updateStrategy": {"rollingUpdate": {"maxUnavailable": None}},
            "template": _POD,
        },
    },
    "sidecar.yaml": {**_HEAD, "spec": {"backoffLimit": None, "template": _POD}},
    "podmonitor.yaml": {
        **_HEAD,
        "spec": {
            "namespaceSelector": {"any": None},
            "selector": {"matchLabels": _LABELS},
            **dict.fromkeys(("sampleLimit", "labelLimit", "labelValueLengthLimit")),
            "podMetricsEndpoints": [{"port": None, "interval": None, "relabelings": [_RELABELING]}],
        },
    },
    "prometheusrule.yaml": {
        **_HEAD,
        "spec": {"groups": [{"name": None, "interval": None, "limit": None, "rules": [_RULE]}]},
    },
}


def manifest(name: str) -> Any:
    return yaml.safe_load((DEPLOY / "kubernetes" / name).read_text("utf-8"))


def unknown(content: Any, shape: Any, at: str = "") -> list[str]:
    """The fields that the API does not have; what it calls a list must be one."""
    if shape is None:
        return []
    if isinstance(shape, list):
        if not isinstance(content, list):
            return [f"{at} is no list"]
        return [found for index, item in enumerate(content) for found in unknown(item, shape[0], f"{at}[{index}]")]
    if not isinstance(content, dict):
        return [f"{at} is no object"]
    known = [found for key in content if key in shape for found in unknown(content[key], shape[key], f"{at}.{key}")]
    return [f"{at}.{key}" for key in content if key not in shape] + known


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_manifest_has_only_fields_that_the_api_knows(name: str) -> None:
    assert unknown(manifest(name), SHAPES[name]) == []


def test_every_manifest_is_looked_at_and_the_look_notices_mistakes() -> None:
    assert {path.name for path in (DEPLOY / "kubernetes").iterdir()} == set(SHAPES)
    content = manifest("daemonset.yaml")
    content["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    content["spec"]["template"]["spec"]["volumes"] = {"name": "records"}
    spec = ".spec.template.spec"
    assert unknown(content, SHAPES["daemonset.yaml"]) == [
        f"{spec}.containers[0].readynessProbe",
        f"{spec}.volumes is no list",
    ]


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_kubernetes_schema_accepts_the_manifest(name: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validator.validate(manifest(name), "1.29", strict=True)


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_a_pod_mounts_what_it_has_and_serves_what_the_monitor_scrapes(name: str) -> None:
    template = manifest(name)["spec"]["template"]
    containers = template["spec"]["initContainers"] + template["spec"]["containers"]
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == volumes
    assert {mount["mountPath"] for each in containers for mount in each["volumeMounts"]} == {str(SERVICE_DIRECTORY)}
    (daemon,) = (each for each in containers if each["name"] == "gpuwatch")
    assert daemon["image"] == f"gpuwatch:{__version__}" and daemon["ports"][0]["containerPort"] == DEFAULT_PORT
    monitor = manifest("podmonitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert monitor["podMetricsEndpoints"][0]["port"] == daemon["ports"][0]["name"]


def test_the_sidecar_outlives_two_scrapes_and_is_given_the_time() -> None:
    spec = manifest("sidecar.yaml")["spec"]["template"]["spec"]
    stays = int(spec["initContainers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    interval = int(manifest("podmonitor.yaml")["spec"]["podMetricsEndpoints"][0]["interval"].removesuffix("s"))
    assert 2 * interval < stays < spec["terminationGracePeriodSeconds"]


@pytest.mark.debian
@tool("promtool")
def test_the_operators_rules_are_those_for_prometheus(tmp_path: Path) -> None:
    spec = manifest("prometheusrule.yaml")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    assert "SUCCESS" in said_by("promtool", "check", "rules", tmp_path / "rules.yaml")
    assert spec == yaml.safe_load((ROOT / "alerts" / "gpuwatch.rules.yaml").read_text("utf-8"))


# -- one cause pages once ----------------------------------------------------------------------------------------------


def test_every_consequence_in_the_rulebook_is_muted() -> None:
    muted = {
        (each["source_matchers"][0], target)
        for each in _loaded_inhibitions()
        for target in re.split(r"\||\"", each["target_matchers"][0].partition('"')[2])
        if target
    }
    assert muted == {(f'rule="{rule.id}"', id) for rule in RULES for id in rule.suppresses}


def _loaded_inhibitions() -> Sequence[Any]:
    return list(yaml.safe_load(alertmanager_config(RULES))["inhibit_rules"])


def test_an_inhibition_never_crosses_runs_gpus_or_nodes() -> None:
    assert all(each["equal"] for each in _loaded_inhibitions())
    rank, gpu = RULES_BY_ID["data-stall"], RULES_BY_ID["hw-thermal-throttle"]
    assert shared_labels(rank, rank) == ("run", "rank")
    assert shared_labels(gpu, gpu) == ("instance", "gpu", "uuid")
    assert shared_labels(gpu, rank) == ("instance",)


def test_what_befalls_one_rank_explains_what_its_peers_suffer() -> None:
    assert RULES_BY_ID["run-dead"].scope == "peer"
    assert shared_labels(RULES_BY_ID["run-dead"], RULES_BY_ID["run-hang"]) == ("run",)
    assert shared_labels(RULES_BY_ID["run-dead"], RULES_BY_ID["data-stall"]) == ("run",)
