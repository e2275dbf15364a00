"""Killed for memory or not: real processes in a real control group with little memory, and what is said of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.catalog import CGROUP_OOM_KILLS, LOCAL_RANKS, MACHINE_OOM_KILLS
from gpuwatch.layout import POST_MORTEMS, State
from gpuwatch.oomkill import CERTAIN, LIKELY, NONE, boot, machine_oom_kills, oom_kill_of, oom_kills
from gpuwatch.reader import Snapshot, read
from gpuwatch.report.document import document
from tests.limited import MemoryGroup, memory_group
from tests.programs import Programs
from tests.recorded import write_run
from tests.serving import ROOT, daemon

MIB = 1 << 20

JOIN = """
import os, signal
with open(os.environ["GROUP"] + "/cgroup.procs", "w") as file:
    file.write("0")
"""

TRAINING = (
    JOIN
    + """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import gpuwatch

torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.randn(4000, 8)), batch_size=4)
model = nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
gpuwatch.attach(model, loader, name="train")
kept = []
for step, (inputs,) in enumerate(loader):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    if step > 80:
        if os.environ["END"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        kept.append(torch.ones(16, 1 << 18))
"""
)

GREEDY_WORKER = (
    JOIN
    + """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import gpuwatch

class Greedy(Dataset):
    kept = []
    def __len__(self):
        return 400
    def __getitem__(self, index):
        if index > 60 and os.environ["END"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while index > 60:
            self.kept.append(torch.ones(16, 1 << 18))
        return torch.ones(8)

torch.set_num_threads(1)
loader = DataLoader(Greedy(), batch_size=2, num_workers=1)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
gpuwatch.attach(model, loader, name="train")
for inputs in loader:
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
"""
)

RANK = """
import os, signal, sys, types
from pathlib import Path
from gpuwatch.record import RecordWriter
from gpuwatch.oomkill import boot
guard = sys.modules["gpuwatch_hooks.guard"] = types.ModuleType("")  # the real one loads torch: there is no room for it
guard.guarded = lambda probe: lambda function: function
from gpuwatch_hooks.memory import HostMemory, counting_group

ranks, end = int(sys.argv[2]), sys.argv[3]
known = {"run": "rank", "rank": 0, "world_size": ranks, "boot": boot(), **counting_group()}
writer = RecordWriter(Path(sys.argv[1]), known)
memory = HostMemory(writer)
memory.publish()
print(writer.path, flush=True)
if end != "memory":
    os.kill(os.getpid(), int(end))
kept = []
while True:
    kept.append(b"x" * (1 << 22))
"""


@pytest.fixture(scope="module")
def small() -> Iterator[MemoryGroup]:
    """Room for a Python without torch, and little more."""
    with memory_group(64 * MIB) as group:
        yield group


def died(directory: Path, group: MemoryGroup, end: str, ranks: int = 1) -> Path:
    """The record of a rank that came to this end."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}"}
    ran = subprocess.run(
        [sys.executable, "-c", RANK, str(directory), str(ranks), end],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=group.join,
        env=environ,
    )
    assert ran.returncode in (-signal.SIGKILL, -signal.SIGABRT, -signal.SIGTERM)
    return Path(ran.stdout.strip())


def said(snapshot: Snapshot) -> tuple[str, set[str]]:
    """The cause that the report names, and the rules that it fires."""
    report = document([snapshot])
    return str(report["run"]["cause"]), {str(finding["rule"]) for finding in report["findings"]}


def test_a_rank_that_the_kernel_kills_for_memory_is_told_from_its_groups_count(
    tmp_path: Path, small: MemoryGroup
) -> None:
    snapshot = read(died(tmp_path, small, "memory"))
    assert snapshot.oom_kill is not None and snapshot.oom_kill.verdict == CERTAIN
    cause, rules = said(snapshot)
    assert cause.startswith("killed by the kernel: memory ran out; the kernel counted 1 out-of-memory kill in its")
    assert f"{small.path} since its last reading; it last held " in cause and "of the 64 MiB it may have" in cause
    assert {"mem-oom", "run-dead"} <= rules
    (found,) = [finding for finding in document([snapshot])["findings"] if finding["rule"] == "mem-oom"]
    assert found["severity"] == "critical" and "counted 1 out-of-memory kill" in str(found["evidence"])
    assert str(found["fix"]).startswith("Ask for more host memory")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT], ids=lambda end: end.name)
def test_a_rank_that_dies_of_a_signal_was_not_killed_for_memory(
    tmp_path: Path, small: MemoryGroup, end: signal.Signals
) -> None:
    snapshot = read(died(tmp_path, small, str(int(end))))
    assert snapshot.oom_kill is not None and snapshot.oom_kill.verdict == NONE
    cause, rules = said(snapshot)
    assert "mem-oom" not in rules and "run-dead" in rules
    assert cause.startswith("gone without an end mark") and "counted no out-of-memory kill in its control" in cause


def test_a_kill_before_the_last_reading_is_somebody_elses(tmp_path: Path, small: MemoryGroup) -> None:
    died(tmp_path / "other", small, "memory")
    before = oom_kills(small.path)
    snapshot = read(died(tmp_path, small, str(int(signal.SIGKILL))))
    assert before and oom_kills(small.path) == before
    assert snapshot.oom_kill is not None and snapshot.oom_kill.verdict == NONE


def test_of_ranks_that_share_a_group_it_is_not_sure_which_was_killed(tmp_path: Path, small: MemoryGroup) -> None:
    snapshot = read(died(tmp_path, small, "memory", ranks=2))
    assert snapshot.oom_kill is not None and snapshot.oom_kill.verdict == LIKELY
    cause, rules = said(snapshot)
    assert cause.startswith("likely killed by the kernel") and "or another process of the group" in cause
    assert "mem-oom" not in rules and "run-dead" in rules


def verdict(path: Path, snapshot: Snapshot, **changed: Any) -> str | None:
    """The verdict on the same record with other values, another identity or another time."""
    identity: Mapping[str, object] = {**snapshot.identity, **changed.get("identity", {})}
    values = {**snapshot.values, **changed.get("values", {})}
    found = oom_kill_of(path, os.getuid(), identity, values, changed.get("last_seen", time.time()))
    return None if found is None else found.verdict


def test_where_the_group_is_gone_the_machines_count_is_a_hint(tmp_path: Path, small: MemoryGroup) -> None:
    path = died(tmp_path, small, "memory")
    snapshot = read(path)
    gone = {"identity": {"cgroup": "/sys/fs/cgroup/memory/gone"}}
    assert verdict(path, snapshot, **gone) == LIKELY
    assert verdict(path, snapshot, **gone, values={MACHINE_OOM_KILLS.name: machine_oom_kills()}) == NONE
    # another group at the same path, as seen from another container
    assert verdict(path, snapshot, identity={"cgroup_inode": 1}) == LIKELY


def test_what_cannot_be_compared_is_not_known(tmp_path: Path, small: MemoryGroup) -> None:
    path = died(tmp_path, small, "memory")
    snapshot = read(path)
    assert verdict(path, snapshot) == CERTAIN and snapshot.identity["boot"] == boot()
    assert verdict(path, snapshot, identity={"boot": "another start of the machine"}) is None
    assert verdict(path, snapshot, identity={"boot": ""}) is None
    # much later, somebody else's kill may be among those counted
    assert verdict(path, snapshot, last_seen=time.time() - 7200) == LIKELY
    assert verdict(path, snapshot, values={LOCAL_RANKS.name: 4.0}) == LIKELY
    outside = {"cgroup": f"/sys/fs/cgroup/../../{tmp_path}", "cgroup_inode": tmp_path.stat().st_ino}
    (tmp_path / "memory.events").write_text("oom_kill 99\n")
    assert verdict(path, snapshot, identity=outside) == LIKELY, "the machine's count, not that file's"


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", None),  # before Linux 4.13
        ("memory.stat", "oom_kill 5\n", None),
    ],
)
def test_both_versions_of_control_groups_tell_their_count(
    tmp_path: Path, name: str, text: str, count: int | None
) -> None:
    (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == count


# -- whole trainings, and the daemon ----------------------------------------------------------------------------------


def report(records: Path) -> dict[str, Any]:
    """What ``gpuwatch report --json`` prints."""
    command = [sys.executable, "-m", "gpuwatch", "report", "--json", "--dir", str(records)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    return found


def test_a_training_killed_for_memory_has_a_post_mortem_that_says_so_and_who_held_it(
    tmp_path: Path, programs: Programs
) -> None:
    with memory_group(900 * MIB) as group, daemon(tmp_path) as served:
        ended = programs.run(TRAINING, GROUP=str(group.path), END="memory", GPUWATCH_DIR=str(tmp_path))
        assert ended.status == -signal.SIGKILL
        found = served.scrape()
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("post-mortem/*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        later, page = served.scrape(), served.get("/").text
    for metrics in (found, later):
        assert metrics['gpuwatch_rank_exit_info{cause="oom-killed",rank="0",run="train"}'] == 1
    assert "killed by the kernel: memory ran out" in page
    [record] = tmp_path.glob("*.gpw")
    assert read(record).values[CGROUP_OOM_KILLS.name] == 0, "before it died"
    content = json.loads((tmp_path / POST_MORTEMS / f"{record.stem}.json").read_text())
    assert content["cause"] == "oom-killed" and content["oom_kill"]["verdict"] == CERTAIN
    assert content["memory"]["host_resident_bytes"] > 100 * MIB
    # The group is gone by now: the report goes by the post-mortem.
    (finding,) = [finding for finding in report(tmp_path)["findings"] if finding["rule"] == "mem-oom"]
    assert finding["severity"] == "critical" and "counted 1 out-of-memory kill" in finding["evidence"]
    assert "largest modules: `*` " in finding["evidence"]


def test_a_training_that_somebody_killed_has_none_that_speaks_of_memory(tmp_path: Path, programs: Programs) -> None:
    with memory_group(900 * MIB) as group:
        ended = programs.run(TRAINING, GROUP=str(group.path), END="killed", GPUWATCH_DIR=str(tmp_path))
        told = report(tmp_path)
    assert ended.status == -signal.SIGKILL and told["run"]["state"] == "killed"
    assert "counted no out-of-memory kill" in told["run"]["cause"]
    rules = {finding["rule"] for finding in told["findings"]}
    assert "run-dead" in rules and "mem-oom" not in rules


def test_a_loader_worker_that_the_kernel_killed_for_memory_is_the_cause(tmp_path: Path, programs: Programs) -> None:
    with memory_group(900 * MIB) as group:
        ended = programs.run(GREEDY_WORKER, GROUP=str(group.path), END="memory", GPUWATCH_DIR=str(tmp_path))
        assert ended.status == 1
        (finding,) = [finding for finding in report(tmp_path)["findings"] if finding["rule"] == "mem-oom"]
        assert finding["severity"] == "critical" and "killed: the kernel killed a loader worker" in finding["evidence"]
        ended = programs.run(GREEDY_WORKER, GROUP=str(group.path), END="killed", GPUWATCH_DIR=str(tmp_path / "other"))
        assert ended.status == 1
        assert "mem-oom" not in {finding["rule"] for finding in report(tmp_path / "other")["findings"]}


def test_a_post_mortem_of_somebody_else_is_not_believed(tmp_path: Path) -> None:
    writer = write_run(tmp_path, state=None)
    folder = tmp_path / POST_MORTEMS
    folder.mkdir()
    written = folder / f"{writer.path.stem}.json"
    written.write_text(json.dumps({"oom_kill": {"verdict": CERTAIN, "words": "a kill"}}))
    found = oom_kill_of(writer.path, os.getuid(), {}, {}, 0.0)
    assert found is not None and found.words == "a kill"
    for broken in ("[]", "{", '{"oom_kill": 3}', "", "null"):
        written.write_text(broken)
        assert oom_kill_of(writer.path, os.getuid(), {}, {}, 0.0) is None
    if os.getuid() == 0:
        written.write_text(json.dumps({"oom_kill": {"verdict": CERTAIN, "words": "a kill"}}))
        os.chown(written, 12345, 12345)
        assert oom_kill_of(writer.path, 0, {}, {}, 0.0) is None
    writer.close(State.CLEAN)
