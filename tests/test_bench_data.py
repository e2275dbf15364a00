"""The recommended loader setting, applied: two loads of ``make bench-data`` in short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.data import recommended, watched
from bench.loads import Load, Work, step_milliseconds
from gpuwatch.catalog import LOADER_BEST_WAIT
from gpuwatch.delivery import Setting

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

STORAGE = Load("storage", item=Work(asleep=6), collate=Work(), step=Work(asleep=14))
MEMORY = Load("memory", item=Work(), collate=Work(), step=Work(asleep=8))


@pytest.fixture(autouse=True)
def own_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a watched run sets in the environment is put back; threads stay as few as in other tests."""
    for name in ("GPUWATCH_DIR", "GPUWATCH_DAEMON", "GPUWATCH_QUIET"):
        monkeypatch.setenv(name, str(tmp_path))
    torch.set_num_threads(1)


def test_one_worker_that_waits_for_storage_gets_company_and_the_step_becomes_as_short_as_it_can() -> None:
    history = watched(STORAGE, Setting(1, 2))
    advice, remaining = recommended(history), LOADER_BEST_WAIT.value(history)
    assert advice is not None and remaining is not None
    assert 3 <= advice.workers <= 8 and remaining < 0.25, "48 ms a batch for a step of 14"
    for _ in range(3):  # other processes use the cores too
        poor = step_milliseconds(STORAGE, Setting(1, 2), 0.4)
        applied, most = (
            min(step_milliseconds(STORAGE, setting, 0.4) for _ in range(2)) for setting in (advice, Setting(8, 2))
        )
        if applied < 0.6 * poor and applied < 1.35 * most:
            return
    pytest.fail(f"steps of {applied} ms; of {poor} ms before, of {most} ms with eight workers")


def test_two_workers_for_tensors_in_memory_are_two_too_many() -> None:
    advice = recommended(watched(MEMORY, Setting(2, 2)))
    assert advice is not None and advice.workers in (0, 2), "two do no harm where they hardly cost anything"
