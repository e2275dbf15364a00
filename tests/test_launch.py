"""Who a process is among others: by its launcher, its scheduler, or the process group that is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import gpuwatch
from gpuwatch.catalog import GRADIENT_SYNCS, USED_GPUS, VISIBLE_GPUS
from gpuwatch.history import is_split
from gpuwatch.layout import State
from gpuwatch.reader import read_all
from gpuwatch_hooks import attach
from gpuwatch_hooks.identity import identity
from gpuwatch_hooks.launch import Ranks, job_id, ranks_of, run_name
from gpuwatch_hooks.wrappers import Wrappers

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n1",
            "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77"}
POD = "7a1b2c3d-0000-4444-8888-0123456789ab"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, Ranks(5, 8, 1, 4)),
        (SLURM, Ranks(3, 4, 1, 2)),
        ({}, Ranks(0, 1, 0, 1)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "1"}, Ranks(0, 1, 0, 1)),
        ({"RANK": "nonsense", "WORLD_SIZE": "-2"}, Ranks(0, 1, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Ranks(1, 2, 1, 2)),
    ],
)
def test_the_launcher_says_which_rank_it_is(environment: dict[str, str], expected: Ranks) -> None:
    assert ranks_of(environment) == expected


def test_without_a_launcher_the_process_group_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert ranks_of({}) == Ranks(2, 4, 2, 4)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({**TORCHRUN, "GPUWATCH_JOB_ID": "mine"}, "train-mine"),
        (SLURM, "train-77"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "abc"}, "train-abc"),
        (TORCHRUN, "train-n1-29500"),
    ],
)
def test_ranks_on_all_nodes_come_to_the_same_name(environment: dict[str, str], name: str) -> None:
    assert run_name("train", ranks_of(environment), environment) == name


def test_ranks_of_one_parent_come_to_the_same_name_and_processes_alone_do_not() -> None:
    names = {run_name("train", Ranks(rank, 2, rank, 2), {}) for rank in (0, 1)}
    assert len(names) == 1 and names.pop().endswith(f"-{os.getppid()}")
    assert run_name("train", Ranks(0, 1, 0, 1), {}).endswith(f"-{os.getpid()}")


def test_two_jobs_of_one_parent_are_two_runs_and_a_restart_by_torchrun_is_none() -> None:
    spawned = [run_name("train", Ranks(0, 2, 0, 2), {"MASTER_PORT": port}) for port in ("29500", "29501")]
    assert spawned[0] != spawned[1] and all(name.startswith("train-") for name in spawned)
    ranks = Ranks(0, 4, 0, 4)
    assert len({run_name("train", ranks, {**TORCHRUN, "MASTER_PORT": port}) for port in ("29500", "29501")}) == 1


def test_a_job_is_called_as_its_scheduler_calls_it(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 2 8:1 /var/lib/kubelet/pods/{POD}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n")
    assert job_id({"GPUWATCH_JOB_ID": "mine", **SLURM}, mounts) == "mine"
    assert job_id(SLURM, mounts) == "77"
    assert job_id(TORCHRUN, mounts) == POD
    assert job_id({**TORCHRUN, "TORCHELASTIC_RUN_ID": "abc"}, tmp_path / "none") == "abc"
    assert job_id(TORCHRUN, tmp_path / "none") is None


def test_an_experiment_is_named_by_the_environment_or_the_script() -> None:
    assert identity("r", "cpu", {"GPUWATCH_EXPERIMENT": "resnet"})["experiment"] == "resnet"
    assert identity("r", "cpu", {})["experiment"]
    assert identity("r", "cpu", TORCHRUN)["local_world_size"] == 4


# -- wrappers ----------------------------------------------------------------------------------------------------------


def test_data_parallel_is_found_wherever_it_is(records: Path) -> None:
    found = Wrappers()
    found.find([nn.DataParallel(nn.Linear(2, 2)), nn.ModuleDict({"trunk": nn.DataParallel(nn.Linear(2, 2))})])
    assert found.replicated == {"DataParallel": [], "trunk": []}
    assert found.distributed() is None and found.reduces() is None
    found.find([nn.Linear(2, 2)])
    assert found.replicated == {}


def test_what_a_wrapper_wraps_is_enough_to_find_it(records: Path, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner = nn.Linear(2, 1)
        model = nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with gpuwatch.attach(inner):
            for micro in range(60):
                model(torch.ones(4, 2)).sum().backward()
                if micro % 2:
                    optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    (record,), _ = read_all(records)
    assert record.values[GRADIENT_SYNCS.name] == 2


@pytest.mark.parametrize("at", [5, 70])
def test_a_model_that_is_wrapped_anew_is_the_same_run(at: int, records: Path, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner = nn.Linear(2, 1)
        model = nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        gpuwatch.attach(model)
        for step in range(130):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            if step == at:
                model = nn.parallel.DistributedDataParallel(inner)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = attach._active
        assert run is not None and run.session.living() == [inner]
        assert run.session.distributed.wrappers.distributed() is model
        with gpuwatch.attach(model):  # given anew, it is watched in place of what took its predecessor's
            assert attach._active is run and run.session.living() == [model]
        attach.end(run, State.DETACHED)
    finally:
        torch.distributed.destroy_process_group()
    (record,), _ = read_all(records)
    assert record.step == 130
    assert sum(is_split(row) for row in record.ring) > 60


def test_a_model_without_wrappers_says_nothing_of_other_ranks(records: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gpuwatch.attach(model):
        for _ in range(30):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
    (record,), _ = read_all(records)
    told = [key for key in record.values if any(word in key for word in ("ddp", "syncs", "own_", "collectives"))]
    assert told == []


def test_accelerators_that_are_left_alone_are_counted(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 1 << 20 if index == 2 else 0)
    from gpuwatch.record import RecordWriter
    from gpuwatch_hooks.distributed import DistributedProbe

    writer = RecordWriter(records, {"run": "r", "rank": 0})
    DistributedProbe(writer, [], []).publish()
    values = writer.snapshot().values
    assert (values[VISIBLE_GPUS.name], values[USED_GPUS.name]) == (4, 1)
