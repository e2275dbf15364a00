"""However a program ends, it ends as without gpuwatch: status, traceback, standard output, time."""

from __future__ import annotations

import textwrap

import pytest

from gpuwatch.layout import State
from gpuwatch.reader import read_all
from tests.programs import Ended, Programs

PROGRAM = """
import os, signal, sys, threading
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

if os.environ.get("WATCHED"):
    from gpuwatch import attach
else:
    def attach(*arguments, **options):
        pass


class Data(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        {in_dataset}
        return torch.randn(4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 1), 0

    def forward(self, inputs):
        self.calls += 1
        {in_forward}
        return self.layer(inputs)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        {in_backward}
        return gradient


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        {in_optimizer}
        return super().step(closure)


def train():
    torch.manual_seed(0)
    model = Model()
    loader = DataLoader(Data(), 2, num_workers={workers})
    optimizer = Optimizer(model.parameters(), 0.1)
    attach(model, loader)
    for step, batch in enumerate(loader):
        loss = Broken.apply(model(batch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())
        {in_loop}
    print("trained")


{at_start}
train()
{at_end}
"""

HOLES = ("in_dataset", "in_forward", "in_backward", "in_optimizer", "in_loop", "at_start", "at_end")
LATE = 90
"""A step between two looks."""

ENDINGS: dict[str, tuple[dict[str, str], int, State]] = {
    "at its end": ({}, 0, State.CLEAN),
    "SIGINT in the loop": ({"in_loop": f"if step == {LATE}: os.kill(os.getpid(), signal.SIGINT)"}, -2, State.EXCEPTION),
    "SIGINT during a look": ({"in_loop": "if step == 5: os.kill(os.getpid(), signal.SIGINT)"}, -2, State.EXCEPTION),
    "sys.exit(3)": ({"in_loop": f"if step == {LATE}: sys.exit(3)"}, 3, State.EXCEPTION),
    "sys.exit with a text": ({"in_forward": "if self.calls == 7: sys.exit('no more')"}, 1, State.EXCEPTION),
    "sys.exit in good order": ({"at_end": "sys.exit(0)"}, 0, State.CLEAN),
    "sys.exit that is caught": (
        {"at_end": "try: sys.exit(3)\nexcept SystemExit as ending: print(ending.code, ending.__traceback__.tb_next)"},
        0,
        State.CLEAN,
    ),
    "sys.exit in a thread": (
        {"at_end": "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()"},
        0,
        State.CLEAN,
    ),
    "an exception in forward": ({"in_forward": "1 / (self.calls - 9)"}, 1, State.EXCEPTION),
    "an exception in a late forward": ({"in_forward": f"1 / (self.calls - {LATE})"}, 1, State.EXCEPTION),
    "an exception in backward": ({"in_backward": "raise KeyError(gradient.shape)"}, 1, State.EXCEPTION),
    "an exception in the optimizer": ({"in_optimizer": "raise OSError(5, 'no')"}, 1, State.EXCEPTION),
    "an exception in the data set": ({"in_dataset": "1 / (index - 30)"}, 1, State.EXCEPTION),
    "an exception in a worker": ({"in_dataset": "1 / (index - 30)", "workers": "2"}, 1, State.EXCEPTION),
    "an exception after training": ({"at_end": "1 / 0"}, 1, State.EXCEPTION),
    "an exception that is handled": (
        {
            "in_forward": "if self.calls == 9 and len(sys.argv) < 2: sys.argv.append(''); raise ValueError",
            "at_start": "try: train()\nexcept ValueError: pass",
        },
        0,
        State.CLEAN,
    ),
    "an exception of the user's hook": (
        {"at_start": "sys.excepthook = lambda kind, *_: print('hook', kind)", "in_loop": "1 / (step - 70)"},
        1,
        State.EXCEPTION,
    ),
    "a thread that trains": (
        {"at_start": "thread = threading.Thread(target=train); thread.start(); thread.join()"},
        0,
        State.CLEAN,
    ),
    "standard error closed": ({"at_end": "sys.stderr.close(); sys.stderr = None"}, 0, State.CLEAN),
}


def program(**holes: str) -> str:
    """The program with these lines in it."""
    filled = {"workers": "0", **dict.fromkeys(HOLES, "pass"), **holes}
    return textwrap.dedent(PROGRAM).format(**filled)


def both(programs: Programs, text: str, **environment: str) -> tuple[Ended, Ended]:
    """Without gpuwatch and with it."""
    return programs.run(text, **environment), programs.run(text, WATCHED="1", **environment)


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_ends_as_without_gpuwatch(name: str, programs: Programs) -> None:
    holes, status, state = ENDINGS[name]
    without, watched = both(programs, program(**holes))
    assert (without.status, watched.status) == (status, status), watched.err
    assert watched.out == without.out
    assert watched.traceback == without.traceback
    assert watched.seconds < 3 * without.seconds + 1.5
    record = read_all(watched.records)[0][-1]
    assert record.state is state and not record.up
    if "closed" not in name:
        assert "gpuwatch: " in watched.err and "the whole report: gpuwatch report" in watched.err
    assert "probe" not in watched.err and "gpuwatch_hooks" not in watched.err.rpartition("File ")[2]


@pytest.mark.parametrize("name", ["at its end", "an exception in forward"])
def test_a_quiet_program_says_nothing_of_its_own(name: str, programs: Programs) -> None:
    without, watched = both(programs, program(**ENDINGS[name][0]), GPUWATCH_QUIET="1")
    assert watched.out == without.out
    assert [line for line in watched.err.splitlines() if line.startswith("gpuwatch")] == []
    assert len(read_all(watched.records)[0]) == 1


def test_a_program_whose_gpuwatch_is_disabled_is_untouched(programs: Programs) -> None:
    # A function that took the place of torch's would say so by the file of its code.
    state = (
        "import gc; from torch.optim.optimizer import _global_optimizer_post_hooks as steps; print("
        "[function.__code__.co_filename for function in (torch.autograd._engine_run_backward, nn.Module.train,"
        " nn.Module.__getstate__, torch.compile)], gc.callbacks, len(steps), type(loader), len(model._forward_hooks))"
    )
    without, watched = both(programs, program(in_loop=f"if step == 3: {state}"), GPUWATCH_DISABLE="1")
    assert (watched.status, watched.err) == (without.status, without.err) == (0, "")
    assert watched.out == without.out and "[] 0 <class 'torch.utils.data.dataloader.DataLoader'> 0" in watched.out
    assert not watched.records.exists()


def test_warnings_turned_into_errors_and_development_mode_find_nothing(programs: Programs) -> None:
    ended = programs.run_anew(program(), "-W", "error", "-X", "dev", WATCHED="1")
    assert ended.status == 0 and ended.out.endswith("trained\n"), ended.err
    assert [line for line in ended.err.splitlines() if not line.startswith(("gpuwatch", "  "))] == []
    (record,), _ = read_all(ended.records)
    assert record.state is State.CLEAN and record.step == 200
