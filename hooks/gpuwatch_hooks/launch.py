"""What a launcher says of this process: torchrun, Slurm or Kubernetes by the environment, else torch itself.

Ranks of one launch must come to the same run name without talking to each other, on all nodes and after a restart.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuwatch.config import JOB_ID
from gpuwatch.interruption import expected

_MOUNTS = Path("/proc/self/mountinfo")
_POD = re.compile(r"/pods/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/")


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is, in the run and on its node."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def ranks_of(environment: Mapping[str, str] = os.environ) -> Ranks:
    """As the launcher says; where it says nothing (``mp.spawn``), as the process group that is there already does."""
    world = number(environment, "WORLD_SIZE", "SLURM_NTASKS")
    rank = number(environment, "RANK", *(("SLURM_PROCID",) if (world or 1) > 1 else ()))
    if (world is None or rank is None) and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world = rank or 0, world or 1
    nodes = number(environment, "SLURM_NNODES")
    # Without a launcher that tells: as `mp.spawn` on one node.
    local_world = number(environment, "LOCAL_WORLD_SIZE") or max(1, world // (nodes or 1))
    local_rank = number(environment, "LOCAL_RANK", "SLURM_LOCALID")
    return Ranks(rank, world, rank % local_world if local_rank is None else local_rank, local_world)


def run_name(script: str, ranks: Ranks, environment: Mapping[str, str] = os.environ) -> str:
    """The name of the run: by its job where there is one, else by what its ranks share."""
    job = environment.get(JOB_ID) or environment.get("SLURM_JOB_ID") or _elastic_id(environment)
    if job:
        return f"{script}-{job}"
    if ranks.world > ranks.local_world:
        return f"{script}-{environment.get('MASTER_ADDR', '')}-{environment.get('MASTER_PORT', '')}"
    if ranks.world > 1:
        # Siblings share their parent; its start tells it from an earlier one of the same number.
        began = _started(os.getppid())
        # One parent may start two jobs at once. Torchrun does not, and changes the port where it starts ranks again.
        port = "" if "TORCHELASTIC_RUN_ID" in environment else environment.get("MASTER_PORT", "")
        name = f"{script}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}-{os.getppid()}"
        return f"{name}-{port}" if port else name
    return f"{script}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def job_id(environment: Mapping[str, str] = os.environ, mounts: Path = _MOUNTS) -> str | None:
    """The job as its scheduler calls it: ``GPUWATCH_JOB_ID``, Slurm, the pod's uid, torchrun's run id; None without."""
    job = environment.get(JOB_ID) or environment.get("SLURM_JOB_ID")
    return job or environment.get("POD_UID") or _pod(mounts) or _elastic_id(environment)


def number(environment: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is a whole number."""
    for name in names:
        text = environment.get(name, "")
        if text.isdecimal():
            return int(text)
    return None


def _elastic_id(environment: Mapping[str, str]) -> str | None:
    text = environment.get("TORCHELASTIC_RUN_ID", "")
    return None if text in ("", "none") else text


def _pod(mounts: Path) -> str | None:
    # The kubelet mounts files of the pod's own into every container, from a directory named by its uid.
    try:
        found = _POD.search(mounts.read_text(encoding="utf-8", errors="replace"))
    except expected(OSError):
        return None
    return found[1] if found else None


def _started(pid: int) -> float:
    """When a process began, Unix time to the second; 0 where that is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        with open("/proc/stat", "rb") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith(b"btime"))
    except expected(OSError, ValueError, IndexError, StopIteration):
        return 0.0
    return boot + ticks // os.sysconf("SC_CLK_TCK")
