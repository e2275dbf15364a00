"""Trainings watched without a line of theirs: what is found, when, and what is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpuwatch.catalog import BATCHES, LOADER_BATCH, LOADER_WORKERS, PHASE_SECONDS
from gpuwatch.expr import series_key
from gpuwatch.reader import Snapshot, read_all
from gpuwatch_hooks.unaided import models_of
from tests.programs import ROOT, Ended, Programs

BEGIN = "from gpuwatch_hooks import unaided; unaided.begin()\n"
MODEL = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
loader, validation = DataLoader(data, batch_size=4), DataLoader(data, batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step(x, y):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
TRAIN = """
for epoch in range(2):
    model.train()
    for x, y in loader:
        step(x, y)
    model.eval()
    with torch.no_grad():
        for x, y in validation:
            model(x)
"""
DATA = series_key(PHASE_SECONDS.name, {"phase": "data"})


def watched(ended: Ended) -> Snapshot:
    """The one record of a program that ended well."""
    assert ended.status == 0, ended.err
    assert "failed" not in ended.err
    (snapshot,) = read_all(ended.records)[0]
    return snapshot


def test_the_model_and_the_training_loader_are_found_and_the_validation_is_not_taken_for_one(
    programs: Programs,
) -> None:
    snapshot = watched(programs.run(BEGIN + MODEL + TRAIN))
    assert snapshot.step == 48 and snapshot.values[BATCHES.name] >= 48
    assert snapshot.values[LOADER_BATCH.name] == 4 and snapshot.values[LOADER_WORKERS.name] == 0
    assert snapshot.values[DATA] > 0


def test_a_loop_without_a_loader_is_noticed_at_its_first_step(programs: Programs) -> None:
    loop = "for _ in range(30): step(torch.randn(4, 8), torch.randn(4, 1))\n"
    snapshot = watched(programs.run(BEGIN + MODEL + loop))
    assert 29 <= snapshot.step <= 30
    assert LOADER_BATCH.name not in snapshot.values and DATA not in snapshot.values


def test_loaders_built_anew_at_every_epoch_are_timed(programs: Programs) -> None:
    loop = "for _ in range(3):\n  loader = DataLoader(data, batch_size=4)\n  for x, y in loader: step(x, y)\n"
    assert watched(programs.run(BEGIN + MODEL + loop)).values[BATCHES.name] == 72


def test_a_validation_that_forgets_to_switch_modes_is_no_second_training_loader(programs: Programs) -> None:
    loop = "for _ in range(2):\n  for x, y in loader: step(x, y)\n  for x, y in validation: model(x)\n"
    snapshot = watched(programs.run(BEGIN + MODEL + loop))
    assert snapshot.values[BATCHES.name] >= 48 and snapshot.values[LOADER_BATCH.name] == 4


def test_a_loader_with_an_iter_of_its_own_is_iterated_once(programs: Programs) -> None:
    kind = """
class Shard(DataLoader):
    calls = 0
    def __iter__(self):
        Shard.calls += 1
        yield from super().__iter__()
loader = Shard(data, batch_size=4)
"""
    ended = programs.run(BEGIN + MODEL + kind + TRAIN + "print(Shard.calls)")
    assert ended.out == "2\n"
    assert watched(ended).step == 48


def test_inference_is_not_watched(programs: Programs) -> None:
    loops = "for x, y in loader: model(x)\nmodel.eval()\nfor x, y in loader: model(x)\n"
    ended = programs.run(BEGIN + MODEL.replace("optimizer = ", "optimizer = None and ") + loops)
    assert ended.status == 0 and ended.err == "" and read_all(ended.records)[0] == []


@pytest.mark.parametrize("line", ["gpuwatch.attach(model, loader, name='mine')", "pass"])
def test_a_program_that_attaches_is_left_to_it(programs: Programs, line: str) -> None:
    ended = programs.run(BEGIN + "import gpuwatch\n" + MODEL + line + "\n" + TRAIN)
    snapshot = watched(ended)
    assert (snapshot.run == "mine") is (line != "pass")
    assert snapshot.step == 48 and snapshot.values[LOADER_BATCH.name] == 4


def test_a_child_of_a_watched_process_reports_nothing_and_one_that_trains_alone_does(programs: Programs) -> None:
    forked = """
import os
def in_child(work):
    child = os.fork()
    if not child:
        work()
        import atexit; atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
def train():
    for x, y in loader: step(x, y)
"""
    alone = watched(programs.run(BEGIN + MODEL + forked + "in_child(train)"))
    assert alone.step == 24
    both = watched(programs.run(BEGIN + MODEL + forked + "train(); in_child(train); train()"))
    assert both.step == 48


def test_the_numbers_of_a_training_stay_the_same(programs: Programs) -> None:
    shown = "print([p.sum().item().hex() for p in model.parameters()], torch.rand(3))\n"
    plain, noticed = (programs.run(begin + MODEL + TRAIN + shown) for begin in ("", BEGIN))
    assert noticed.out == plain.out and plain.status == 0


def test_a_traceback_shows_nothing_of_it(programs: Programs) -> None:
    fall = "model = torch.nn.Linear(9, 1)\nfor x, y in loader: step(x, y)\n"
    plain, noticed = (programs.run(begin + MODEL + fall) for begin in ("", BEGIN))
    assert noticed.status == plain.status == 1
    assert "unaided" not in noticed.err and noticed.traceback[-1] == plain.traceback[-1]


def test_a_search_that_fails_costs_the_training_nothing(programs: Programs) -> None:
    ended = programs.run(BEGIN + "unaided.models_of = None\n" + MODEL + TRAIN + "print('trained')")
    assert ended.status == 0 and ended.out == "trained\n" and "probe unaided failed" in ended.err


def test_the_whole_way_from_the_command_to_the_record(tmp_path: Path) -> None:
    early = "import os, sys\nassert 'torch' not in sys.modules\nos.environ['OMP_NUM_THREADS'] = '1'\n"
    (tmp_path / "train.py").write_text(early + MODEL + "if __name__ == '__main__':\n  print(torch.get_num_threads())\n")
    with (tmp_path / "train.py").open("a") as script:
        script.write("  for x, y in loader: step(x, y)\n")
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}", "GPUWATCH_DAEMON": "0", "GPUWATCH_QUIET": "1"}
    environment |= {"GPUWATCH_DIR": str(tmp_path / "records"), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "gpuwatch", "run", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=180
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    (snapshot,) = read_all(tmp_path / "records")[0]
    assert snapshot.step == 24 and snapshot.identity["script"] == "train.py"


# -- which models ------------------------------------------------------------------------------------------------------


class Wrapper(torch.nn.Module):
    """A model around a model."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the inner one."""
        return torch.as_tensor(self.inner(x))


def found(*parameters: torch.Tensor) -> list[torch.nn.Module]:
    return models_of({id(each) for each in parameters})


def test_the_outermost_model_is_the_one_that_is_called() -> None:
    inner = torch.nn.Linear(2, 2)
    assert found(inner.weight) == [inner]
    outer = Wrapper(torch.nn.Sequential(inner))
    assert found(inner.weight) == [outer] and found(*outer.parameters()) == [outer]


def test_a_wrapper_with_a_forward_of_its_own_instance_is_called_itself() -> None:
    inner = torch.nn.Linear(2, 2)
    compiled = torch.nn.ModuleDict({"_orig_mod": inner})
    assert found(inner.weight) == [inner]
    compiled.forward = inner.forward
    assert found(inner.weight) == [compiled]


def test_two_models_are_two_and_a_list_of_models_is_not_one() -> None:
    generator, discriminator, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    assert {id(each) for each in found(generator.weight, discriminator.bias)} == {id(generator), id(discriminator)}
    kept = torch.nn.ModuleDict({"g": generator, "d": discriminator, "o": other})
    assert {id(each) for each in found(generator.weight, discriminator.bias)} == {id(generator), id(discriminator)}
    del kept


def test_no_model_holds_a_bare_parameter() -> None:
    assert found(torch.nn.Parameter(torch.zeros(2))) == []


def test_a_module_that_holds_itself_is_no_trap() -> None:
    one = Wrapper(torch.nn.Linear(2, 2))
    one.inner.register_module("above", one)
    assert found(*one.inner.parameters()) in ([one], [])
