"""What a loader says of itself, asked in no way that would run code of the user's."""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.sampler import RandomSampler

from gpuwatch_hooks.holdings import attributes_of


def setting(loader: object, name: str) -> Any:
    """An attribute of a loader; None where it has none, or where only code of the user's would tell.

    torch's loaders are asked as anybody asks them. Of others, that may answer anything to any name, and raise, only
    what is stored counts: a wrapper's own loader is seen when that is iterated.
    """
    kind = type(loader)
    if issubclass(kind, DataLoader):
        return getattr(loader, name, None)
    own = attributes_of(loader)
    if name in own:
        return own[name]
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    if isinstance(found, MemberDescriptorType):  # a slot, which may be empty
        try:
            return found.__get__(loader, kind)
        except AttributeError:
            return None
    return None if hasattr(type(found), "__get__") else found


def items(loader: object) -> int | None:
    """Length of the data set. Asked only where torch's own sampler asks too: it may be the user's code."""
    dataset, sampler = setting(loader, "dataset"), setting(loader, "sampler")
    if type(sampler) not in (SequentialSampler, RandomSampler) or sampler.data_source is not dataset:
        return None
    try:
        return whole(len(dataset))
    except (TypeError, NotImplementedError):
        return None


def whole(number: object) -> int | None:
    """A number that counts something; None for anything else."""
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None


def flag(value: object) -> bool | None:
    """A switch; None for anything else."""
    return value if isinstance(value, bool) else None
