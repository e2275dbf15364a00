"""Who this process is: run, rank, world, script. Read once at attach, from the environment."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping

import torch

from gpuwatch.config import JOB_ID
from gpuwatch.oomkill import boot
from gpuwatch_hooks.cgroups import cpu_quota
from gpuwatch_hooks.memory import counting_group


def identity(name: str | None, device: str, environment: Mapping[str, str] = os.environ) -> dict[str, object]:
    """The identity a record carries. Ranks of one launch get the same run name without talking to each other."""
    world = _number(environment, "WORLD_SIZE", "SLURM_NTASKS") or 1
    script = os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "") or "python"
    return {
        "run": name or _run_name(os.path.splitext(script)[0], world, environment),
        "rank": _number(environment, "RANK", *(("SLURM_PROCID",) if world > 1 else ())) or 0,
        "local_rank": _number(environment, "LOCAL_RANK", "SLURM_LOCALID") or 0,
        "world_size": world,
        "restart": _number(environment, "TORCHELASTIC_RESTART_COUNT") or 0,
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


def _run_name(script: str, world: int, environment: Mapping[str, str]) -> str:
    job = environment.get(JOB_ID) or environment.get("SLURM_JOB_ID") or environment.get("TORCHELASTIC_RUN_ID")
    if job and job != "none":
        return f"{script}-{job}"
    if world > 1:
        # Siblings of one launcher share a parent and a port.
        return f"{script}-{environment.get('MASTER_PORT', '')}-{os.getppid()}"
    return f"{script}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environment.get(name, "")
        if text.isdecimal():
            return int(text)
    return None


def cpu_budget(environment: Mapping[str, str] = os.environ) -> float:
    """Cores this rank may use: the affinity mask or the control groups' quota, over the ranks of the node."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min(cores, cpu_quota() or cores) / local_ranks(environment)


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks of this run on this node, as the launcher says."""
    return _number(environment, "LOCAL_WORLD_SIZE") or 1
