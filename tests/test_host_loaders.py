"""A watched loader behaves as before, whatever it is."""

from __future__ import annotations

import abc
import copy
import gc
import inspect
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import gpuwatch


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure torch waits five seconds for each worker, with gpuwatch and without."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


DATA = TensorDataset(torch.arange(12.0).view(6, 2))
REGISTRY: list[str] = []


class Numbers(IterableDataset[int]):
    """A stream without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Doubled(DataLoader[Any]):
    """A loader with its own iteration, and an attribute that may be set once."""

    def __iter__(self) -> Any:
        for (batch,) in super().__iter__():
            yield batch * 2


class Delegating:
    """A wrapper that hands everything on."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Own:
    """Its own iterator, with a switch the loop may set, and slots."""

    __slots__ = ("__weakref__", "at", "skip")

    def __init__(self) -> None:
        self.at, self.skip = 0, False

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.skip or self.at > 5:
            raise StopIteration
        return self.at


class Frozen:
    """No attribute can be set, and reading one may raise."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Registered:
    """Every subclass is written down."""

    def __init_subclass__(cls) -> None:
        REGISTRY.append(cls.__name__)

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


class Meta(type):
    """Every class is written down."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        REGISTRY.append(name)


class Counted(metaclass=Meta):
    """Of a class that is counted."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


class Interface(abc.ABC):
    """What a loader must have."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[int]:
        """The batches."""


class Abstract(Interface):
    """Of an abstract class."""

    def __iter__(self) -> Iterator[int]:
        return iter([3, 4])

    def __len__(self) -> int:
        return 2


def generator() -> Iterator[int]:
    yield from range(4)


LOADERS: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(DATA, 2),
    "loader with workers": lambda: DataLoader(DATA, 2, num_workers=2),
    "loader without batches": lambda: DataLoader(DATA, batch_size=None),
    "stream": lambda: DataLoader(Numbers(), 2),
    "dictionaries": lambda: DataLoader([{"x": number} for number in range(4)], 2),  # type: ignore[arg-type]
    "own iteration": lambda: Doubled(DATA, 2),
    "delegating": lambda: Delegating(DataLoader(DATA, 2)),
    "own iterator": Own,
    "frozen": Frozen,
    "registered": Registered,
    "counted": Counted,
    "abstract": Abstract,
    "generator": generator,
    "list": lambda: [(1, 2), (3, 4)],
    "list of tensors": lambda: [torch.ones(2), torch.zeros(2)],
    "tuple": lambda: ({"x": 1}, {"x": 2}),
    "range": lambda: range(4),
    "islice of a cycle": lambda: itertools.islice(itertools.cycle([1, 2]), 5),
    "zip": lambda: zip([1], [2], strict=True),
    "map": lambda: map(str, [1, 2]),
    "dictionary": lambda: {"a": 1, "b": 2},
    "enumerate": lambda: enumerate("ab"),
    "dataset": lambda: Numbers(),
}


def shown(loader: Any) -> tuple[object, ...]:
    """What a program can see of a loader, then its batches."""
    kind = type(loader)
    iterator = iter(loader)
    seen = (
        [isinstance(loader, other) for other in (DataLoader, Doubled, Own, Abstract, types.GeneratorType, list)],
        loader.__class__.__name__,
        (kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__),
        len(loader) if hasattr(kind, "__len__") and not isinstance(loader, DataLoader) else None,
        repr(loader).partition(" at 0x")[0],
        hasattr(loader, "__dict__") and sorted(vars(loader)),
        [isinstance(iterator, other) for other in (_BaseDataLoaderIter, types.GeneratorType, Own)],
        (type(iterator) if iterator is loader else isinstance(iterator, Iterator)) if kind.__name__ != "Own" else None,
        bool(iterator) if not isinstance(loader, DataLoader) else None,
        inspect.isgenerator(iterator),
    )
    return (*seen, str(list(iterator)))


@pytest.mark.parametrize("name", LOADERS)
def test_a_watched_loader_looks_and_iterates_as_before(name: str, records: Path) -> None:
    REGISTRY.clear()
    expected = shown(LOADERS[name]())
    loader = LOADERS[name]()
    with gpuwatch.attach(nn.Linear(1, 1), loader):
        actual = shown(loader)
    assert actual == expected
    assert REGISTRY == [], "no registry of classes sees another class"


@pytest.mark.parametrize("name", ["loader", "own iteration", "own iterator", "abstract", "stream"])
def test_copies_and_pickles_of_a_watched_loader_are_of_its_own_class(name: str, records: Path) -> None:
    original = LOADERS[name]()
    loader = LOADERS[name]()
    kind = type(loader)
    with gpuwatch.attach(nn.Linear(1, 1), loader):
        copies = [copy.copy(loader), copy.deepcopy(loader)]
        copies += [pickle.loads(pickle.dumps(loader, protocol)) for protocol in range(2, 6)]
        for replica in copies:
            assert type(replica) is kind
            assert str(list(replica)) == str(list(copy.deepcopy(original)))


def test_attributes_of_a_watched_loader_can_be_set_as_before(records: Path) -> None:
    loader = DataLoader(DATA, 2)
    with gpuwatch.attach(nn.Linear(1, 1), loader):
        loader.note = 5
        assert vars(loader)["note"] == 5
        with pytest.raises(ValueError, match="batch_size attribute should not be set"):
            loader.batch_size = 4
        assert len(loader) == 3 and loader.dataset is DATA
    assert type(loader) is DataLoader


def test_what_is_set_on_an_iterator_reaches_it(records: Path) -> None:
    loader = Own()
    with gpuwatch.attach(nn.Linear(1, 1), loader):
        iterator: Any = iter(loader)
        assert next(iterator) == 1 and iterator.at == 1
        assert copy.copy(iterator).at == 1 and type(copy.copy(iterator)) is Own
        iterator.skip = True
        assert loader.skip and list(iterator) == []


def test_a_generator_can_be_sent_to_and_closed(records: Path) -> None:
    class Talking:
        def __iter__(self) -> Any:
            heard = yield 1
            while True:
                heard = yield heard

    loader = Talking()
    with gpuwatch.attach(nn.Linear(1, 1), loader):
        iterator: Any = iter(loader)
        assert next(iterator) == 1 and iterator.send("hello") == "hello"
        iterator.close()
        assert list(iterator) == []


def test_persistent_workers_keep_their_iterator_over_epochs_and_end_with_it(records: Path) -> None:
    loader = DataLoader(DATA, 2, num_workers=1, persistent_workers=True)
    with gpuwatch.attach(nn.Linear(1, 1), loader):
        first, second = iter(loader), None
        assert len(list(first)) == 3
        second = iter(loader)
        assert second is first and len(list(second)) == 3
        workers = list(first._workers)  # type: ignore[attr-defined]
    del first, second, loader
    gc.collect()
    for worker in workers:
        worker.join(5)
        assert worker.exitcode is not None


@pytest.mark.parametrize("workers", [0, 1])
def test_the_users_exception_comes_out_of_the_loader_as_it_was(workers: int, records: Path) -> None:
    loader: DataLoader[Any] = DataLoader(Failing(), 1, num_workers=workers)
    seen = []
    with gpuwatch.attach(nn.Linear(1, 1), loader), pytest.raises(ZeroDivisionError) as caught:
        for batch in loader:
            seen.append(batch)
    assert len(seen) == 2
    assert caught.traceback[-1].name == ("__getitem__" if workers == 0 else "reraise")
    if sys.version_info >= (3, 11):  # before, python keeps the frame
        assert not any("gpuwatch_hooks" in str(entry.path) for entry in caught.traceback)
    assert caught.value.__context__ is None and caught.value.__cause__ is None


class Failing(torch.utils.data.Dataset[int]):
    """Its third item cannot be had."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 1 // (2 - index) if index > 1 else index


def test_an_iterator_that_is_none_is_the_same_mistake_as_before(records: Path) -> None:
    class Wrong:
        def __iter__(self) -> Any:
            return None

    loader = Wrong()
    with gpuwatch.attach(nn.Linear(1, 1), loader), pytest.raises(TypeError, match="non-iterator of type 'NoneType'"):
        iter(loader)
