"""Several ranks of one run, for real: processes that reduce gradients on gloo, and what is said of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwatch.advisor import Finding, advise_run
from gpuwatch.catalog import COLLECTIVES, DDP_SECONDS, GRADIENT_SYNCS
from gpuwatch.expr import series_key
from gpuwatch.layout import State
from gpuwatch.reader import Snapshot, read_all
from gpuwatch.report.document import document
from tests.programs import ROOT, Ended, Programs
from tests.rankprograms import ranks

SHARDED = """
from torch.distributed.fsdp import fully_shard
model = fully_shard(net)
"""


def records_of(ended: Ended) -> list[Snapshot]:
    """The records of the run, one per rank."""
    found, rejected = read_all(ended.records)
    assert not rejected
    return sorted(found, key=lambda snapshot: snapshot.rank)


def compared(found: list[Snapshot]) -> dict[str, Finding]:
    """What is said of the ranks beside each other."""
    return {finding.rule: finding for finding, _ in advise_run(found) if finding.rule.startswith(("dist", "run"))}


@pytest.mark.parametrize(("place", "phase", "slow"), [("forward", "forward", 1), ("backward", "backward", 0)])
def test_the_slow_rank_and_its_phase_are_named(place: str, phase: str, slow: int, programs: Programs) -> None:
    ended = ranks(programs, f'if RANK == {slow} and place == "{place}": time.sleep(0.03)')
    assert ended.status == 0, ended.err
    found = records_of(ended)
    said = compared(found)
    assert set(said) == {"dist-straggler"}
    straggler = said["dist-straggler"]
    assert straggler.where.startswith(f"rank {slow} on ") and straggler.where.endswith(f"phase: {phase}")
    assert straggler.gain_bound is not None and straggler.gain_bound > 1.25
    (told,) = [each for each in document(found)["findings"] if each["rule"] == "dist-straggler"]
    assert (told["rank"], told["ranks"]) == (slow, [slow])


def test_ranks_that_are_equally_slow_are_no_stragglers(programs: Programs) -> None:
    ended = ranks(programs, 'if place == "forward": time.sleep(0.03)')
    assert ended.status == 0, ended.err
    found = records_of(ended)
    assert compared(found) == {}
    first, second = found
    assert first.run == second.run and [each.rank for each in found] == [0, 1]
    for each in found:
        assert each.identity["world_size"] == each.identity["local_world_size"] == 2
        assert each.values[GRADIENT_SYNCS.name] == 1
        assert 0 < each.values[series_key(DDP_SECONDS.name, {"part": "communication"})] < 1
        done, begun = (
            each.values[series_key(COLLECTIVES.name, {"group": "0", "state": state})]
            for state in ("completed", "enqueued")
        )
        assert 60 <= done <= begun


@pytest.mark.parametrize("last_only", [False, True], ids=["every backward reduces", "only the last one does"])
def test_accumulation_without_no_sync_is_told(last_only: bool, programs: Programs) -> None:
    accumulate = """
    from contextlib import nullcontext
    class Accumulating(DistributedDataParallel):
        def forward(self, batch):
            return super().forward(batch)
    model = Accumulating(net, find_unused_parameters=True)
    """
    here = f"""
    if place == "loop":
        for micro in range(1):
            with model.no_sync() if {last_only} else __import__("contextlib").nullcontext():
                model(torch.randn(8, 8)).sum().backward()
    """
    ended = ranks(programs, here, accumulate, steps=52)
    assert ended.status == 0, ended.err
    said = compared(records_of(ended))
    assert ("dist-no-sync-missing" in said) is not last_only
    assert "dist-unused-params-flag" in said
    if not last_only:
        assert said["dist-no-sync-missing"].evidence.startswith("2 backward passes")


def test_sharded_ranks_are_compared_in_what_is_no_wait(programs: Programs) -> None:
    ended = ranks(programs, 'if RANK == 1 and place == "loop": time.sleep(0.03)', SHARDED)
    assert ended.status == 0, ended.err
    said = compared(records_of(ended))
    assert said["dist-straggler"].where.endswith("phase: other")


def test_a_rank_that_never_enters_is_named_by_those_that_wait(programs: Programs) -> None:
    look = """
    import dataclasses, pathlib
    from gpuwatch.advisor import advise_run
    from gpuwatch.reader import read_all
    def silent():
        found, _ = read_all(pathlib.Path(os.environ["GPUWATCH_DIR"]))
        return found if len(found) == 2 and all(each.progress_age > 3 and each.step >= 30 for each in found) else None
    end = time.monotonic() + 300
    while not (found := silent()):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert all(each.up for each in found), found
    later = [dataclasses.replace(each, progress_age=400.0) for each in found]
    said = [(each.where, each.evidence) for each, _ in advise_run(later) if each.rule == "run-hang"]
    print(json.dumps([said, [each.phase.name for each in sorted(found, key=lambda each: each.rank)]]))
    for child in children:
        os.kill(child, signal.SIGKILL)
    """
    ended = ranks(programs, 'if RANK == 1 and step == 30 and place == "forward": time.sleep(60)', parent=look)
    said, phases = json.loads(ended.out.splitlines()[0])
    assert phases == ["BACKWARD", "FORWARD"]
    ((where, evidence),) = said
    assert where.startswith("rank 1 on ")
    assert "this rank has completed 30 steps" in evidence


@pytest.mark.parametrize(
    ("place", "does", "model", "words"),
    [
        ("forward", "time.sleep(60)", "model = DistributedDataParallel(net)", "its main thread sleeps"),
        ("loop", "[None for _ in iter(int, 1)]", SHARDED, "its main thread is running"),
        ("end", "dist.barrier()", "model = DistributedDataParallel(net)", "its main thread waits for a lock"),
    ],
    ids=["sleeping in its forward", "computing while the others wait in theirs", "in a collective of its own"],
)
def test_long_after_the_first_steps_the_rank_that_never_entered_is_named(
    place: str, does: str, model: str, words: str, programs: Programs
) -> None:
    look = """
    import dataclasses, pathlib
    from gpuwatch.report.document import findings_of
    from gpuwatch.reader import read_all
    def silent():
        found, _ = read_all(pathlib.Path(os.environ["GPUWATCH_DIR"]))
        return found if len(found) == 2 and all(each.progress_age > 3 and each.step >= 89 for each in found) else None
    end = time.monotonic() + 300
    while not (found := silent()):
        assert time.monotonic() < end
        time.sleep(0.2)
    later = [dataclasses.replace(each, progress_age=400.0) for each in found]
    hung = [each for each in findings_of(later) if each["rule"] == "run-hang"]
    print(json.dumps([[each["rank"], each["evidence"].rpartition("; ")[2]] for each in hung]))
    for child in children:
        os.kill(child, signal.SIGKILL)
    """
    here = f'if RANK == 0 and step == 90 and place == "{place}": {does}'
    ((rank, evidence),) = json.loads(ranks(programs, here, model, steps=120, parent=look).out.splitlines()[0])
    assert rank == 0 and evidence.startswith(words)


def test_the_rank_that_was_killed_is_told_from_the_one_that_failed_for_it(programs: Programs) -> None:
    ended = ranks(programs, 'if RANK == 1 and step == 30 and place == "loop": os.kill(os.getpid(), signal.SIGKILL)')
    found = records_of(ended)
    assert [each.state for each in found] == [State.EXCEPTION, State.RUNNING]
    said = compared(found)
    assert said["run-dead"].where.startswith("rank 1 on ") and "step is 30" in said["run-dead"].evidence
    report = document(found)
    assert report["run"]["state"] == "killed" and str(report["run"]["cause"]).startswith("rank 1: gone without")


@pytest.mark.parametrize("model", ["model = DistributedDataParallel(net)", SHARDED], ids=["replicated", "sharded"])
def test_several_ranks_compute_the_same_to_the_last_bit(model: str, programs: Programs) -> None:
    plain, watched = (
        ranks(programs, model=model, steps=80, PYTHONHASHSEED="0", **disabled)
        for disabled in ({"GPUWATCH_DISABLE": "1"}, {})
    )
    assert (plain.status, watched.status) == (0, 0), watched.err
    assert sorted(watched.out.splitlines()) == sorted(plain.out.splitlines())
    assert [each.step for each in records_of(watched)] == [80, 80]


TORCHRUN = """
import os, sys
import torch, torch.distributed as dist
import gpuwatch
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
gpuwatch.attach(model)
for step in range(20):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 10 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os._exit(7)
dist.destroy_process_group()
"""


def test_a_restart_by_torchrun_is_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TORCHRUN)
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}",
        "GPUWATCH_DIR": str(tmp_path / "records"),
        "GPUWATCH_DAEMON": "0",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
         "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, rejected = read_all(tmp_path / "records")
    assert not rejected
    assert sorted((each.rank, each.identity["restart"]) for each in found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({each.run for each in found}) == len({each.identity["job_id"] for each in found}) == 1
    assert {each.identity["experiment"] for each in found} == {"train"}
    assert all((each.step, each.state) == (20, State.CLEAN) for each in found if each.identity["restart"] == 1)
    assert done.stderr.count("the whole report") >= 2
