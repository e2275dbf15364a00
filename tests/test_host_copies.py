"""Copies, pickles, saved files and scripts of what is watched are as if it were not watched."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch
from tests.trainings import Recurrent, Transformer, perceptron


class OwnState(nn.Module):
    """A model that says itself what its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One number an item."""
        output: torch.Tensor = self.layer(inputs)
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "extra": 1}


class OwnTrain(nn.Linear):
    """A model whose ``train`` is the training, as beginners write it."""

    def train(self, batches: Any = True, epochs: int = 1) -> Any:
        """Not the switch of modes, unless it is called as one."""
        return epochs if isinstance(batches, list) else super().train(batches)


LOOKED_AT, RESTING = 3, 80


@contextmanager
def watched(model: nn.Module, steps: int, inputs: torch.Tensor) -> Iterator[torch.optim.Optimizer]:
    """Train the model for some steps, and stay attached."""
    optimizer = torch.optim.Adam(model.parameters())
    with gpuwatch.attach(model):
        for _ in range(steps):
            output = model(inputs)
            (output[0] if isinstance(output, tuple) else output).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield optimizer


def hooks_of(model: nn.Module) -> int:
    """Hooks of all its modules."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def saved(model: nn.Module) -> nn.Module:
    """Through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(model, file)
    loaded: nn.Module = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    return loaded


WAYS: list[Callable[[Any], Any]] = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved, copy.copy]
MODELS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (perceptron, (2, 6)),
    (Recurrent, (2, 5, 4)),
    (Transformer, (2, 5, 8)),
]


@pytest.mark.parametrize("steps", [0, LOOKED_AT, RESTING])
@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "pickle", "torch.save", "copy"])
@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_a_copy_of_a_watched_model_knows_nothing_of_gpuwatch(
    make: Callable[[], nn.Module], shape: tuple[int, ...], way: Callable[[Any], Any], steps: int, records: Path
) -> None:
    model = make()
    keys = list(model.state_dict())
    with watched(model, steps, torch.ones(shape)):
        replica = way(model)
        assert list(model.state_dict()) == list(replica.state_dict()) == keys
        assert hooks_of(replica) == 0
        assert type(replica) is type(model) and vars(replica).keys() == vars(model).keys()
        assert repr(replica) == repr(model)
        assert b"gpuwatch" not in pickle.dumps(model)
        assert model(torch.ones(shape)) is not None
    assert hooks_of(model) == 0


def test_the_hooks_of_the_user_stay_in_copies(records: Path) -> None:
    model = perceptron()
    model.register_forward_hook(users_hook)
    with watched(model, LOOKED_AT, torch.ones(2, 6)):
        assert list(copy.deepcopy(model)._forward_hooks.values()) == [users_hook]
    assert list(model._forward_hooks.values()) == [users_hook]


def users_hook(module: nn.Module, inputs: object, output: object) -> None:
    """A hook of the user's."""


def test_a_model_that_makes_its_own_state_is_copied_and_loads_without_gpuwatch(records: Path) -> None:
    model = OwnState()
    with watched(model, LOOKED_AT, torch.ones(2, 6)):
        replica, pickled = copy.deepcopy(model), pickle.dumps(model)
    assert b"gpuwatch" not in pickled
    for other in (replica, pickle.loads(pickled)):
        assert torch.equal(other(torch.ones(2, 6)), model(torch.ones(2, 6)))


def test_what_is_saved_loads_where_there_is_no_gpuwatch(records: Path, tmp_path: Path) -> None:
    for steps in (LOOKED_AT, RESTING):
        model = perceptron()
        loader = DataLoader(TensorDataset(torch.ones(4, 6)), 2)
        with watched(model, steps, torch.ones(2, 6)) as optimizer, gpuwatch.attach(model, loader):
            next(iter(loader))
            torch.save([model, optimizer, optimizer.state_dict(), loader], tmp_path / f"{steps}.pt")
    script = (
        "import sys, torch\n"
        "for file in sys.argv[1:]:\n"
        "    model, optimizer, state, loader = torch.load(file, weights_only=False)\n"
        "    for (batch,) in loader: model(batch).sum().backward()\n"
        "    optimizer.step()\n"
        "    print(type(loader) is torch.utils.data.DataLoader, len(state['state']))\n"
        "assert not any('gpuwatch' in name for name in sys.modules)\n"
    )
    command = [sys.executable, "-I", "-c", script, *(str(tmp_path / f"{steps}.pt") for steps in (LOOKED_AT, RESTING))]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True 4\nTrue 4\n"), done.stderr


@pytest.mark.parametrize("steps", [LOOKED_AT, RESTING])
def test_a_watched_model_can_be_scripted_traced_and_exported(steps: int, records: Path) -> None:
    model, inputs = nn.Sequential(nn.Linear(6, 3), nn.ReLU()), torch.ones(2, 6)
    expected = model(inputs)
    with watched(model, steps, inputs):
        model.load_state_dict(model.state_dict())
        expected = model(inputs)
        for made in (
            quietly(torch.jit.script, model),
            quietly(torch.jit.trace, model, inputs),
            torch.export.export(model, (inputs,)).module(),
            torch.fx.symbolic_trace(model),
        ):
            assert torch.equal(made(inputs), expected)
        model.eval()
        model(inputs).sum().backward()


def quietly(make: Callable[..., Any], *arguments: object) -> Any:
    """TorchScript says that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make(*arguments)


def test_a_scripted_model_can_be_watched(records: Path) -> None:
    model = quietly(torch.jit.script, nn.Sequential(nn.Linear(6, 1)))
    with watched(model, RESTING, torch.ones(2, 6)):
        assert copy.deepcopy(model)(torch.ones(1, 6)).shape == (1, 1)


def test_a_lazy_model_can_be_watched(records: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(1))
    with gpuwatch.attach(model), watched(model, LOOKED_AT, torch.ones(2, 6)):
        assert type(model[0]) is nn.Linear


def test_a_train_method_of_the_users_own_is_left_alone(records: Path) -> None:
    model = OwnTrain(6, 1)
    before = dict(vars(OwnTrain))
    with watched(model, LOOKED_AT, torch.ones(2, 6)):
        assert model.train([1, 2], epochs=7) == 7
        assert model.eval() is model and not model.training
        assert dict(vars(OwnTrain)) == before
