"""Who this process is: run, rank, world, script. Read once at attach, from the environment."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

import torch

from gpuwatch.config import EXPERIMENT
from gpuwatch.oomkill import boot
from gpuwatch_hooks.cgroups import cpu_quota
from gpuwatch_hooks.launch import job_id, number, ranks_of, run_name
from gpuwatch_hooks.memory import counting_group


def identity(name: str | None, device: str, environment: Mapping[str, str] = os.environ) -> dict[str, object]:
    """The identity a record carries. Ranks of one launch get the same run name without talking to each other."""
    ranks = ranks_of(environment)
    script = os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "") or "python"
    return {
        "run": name or run_name(os.path.splitext(script)[0], ranks, environment),
        "rank": ranks.rank,
        "local_rank": ranks.local_rank,
        "world_size": ranks.world,
        "local_world_size": ranks.local_world,
        "node": platform.node(),
        "job_id": job_id(environment),
        "experiment": environment.get(EXPERIMENT) or os.path.splitext(script)[0],
        "restart": number(environment, "TORCHELASTIC_RESTART_COUNT") or 0,
        "pid": os.getpid(),
        "script": script,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "boot": boot(),
        **counting_group(),
    }


def device_of(model: torch.nn.Module) -> str:
    """Type of the device that holds the model's first parameter, ``cpu`` for a model without one."""
    first = next(model.parameters(), None)
    return "cpu" if first is None else first.device.type


def cpu_budget(environment: Mapping[str, str] = os.environ) -> float:
    """Cores this rank may use: the affinity mask or the control groups' quota, over the ranks of the node."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min(cores, cpu_quota() or cores) / local_ranks(environment)


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks of this run on this node."""
    return ranks_of(environment).local_world
