"""Objects of the user's that get methods of ours and pass for what they were.

An object's class becomes a subclass of the same name: the user's variable, ``isinstance``, ``len`` and every attribute
stay as they were, only this one object is touched, and copies and pickles of it are of its own class. What cannot be
re-classed (a generator) is wrapped.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator
from typing import Any

_MARK = "_gpuwatch_original"
_CLASS: Any = vars(object)["__class__"]


def set_class(item: object, kind: type) -> None:
    """Change an object's class; raises TypeError where its layout does not allow it."""
    _CLASS.__set__(item, kind)  # neither a __setattr__ of the user's nor the property below has a part in this


def original_class(kind: type) -> type | None:
    """What a class of ours passes for; None for any other class."""
    original: type | None = getattr(kind, _MARK, None)
    return original


def undo(item: object) -> None:
    """Give an object its own class back."""
    original = original_class(type(item))
    if original is not None:
        set_class(item, original)


def same_but(kind: type, methods: dict[str, object]) -> type:
    """A subclass that passes for ``kind``: same name, same module, and copies of its objects are of ``kind``."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Without the detour the copy's class would be looked up by name and found to be another one.
        set_class(self, kind)
        try:
            return kind.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        finally:
            set_class(self, disguised)

    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__slots__": (),
        "__class__": property(lambda self: kind),  # what pickle compares with the class to store
        "__reduce_ex__": __reduce_ex__,
        _MARK: kind,
        **methods,
    }
    disguised = type(kind)(kind.__name__, (kind,), namespace)
    return disguised


def can_subclass(kind: type) -> bool:
    """Whether a subclass would be seen by nobody: a metaclass or an __init_subclass__ may register classes."""
    if type(kind) not in (type, abc.ABCMeta):
        return False
    return all(
        "__init_subclass__" not in vars(base) or base.__module__ in ("typing", "builtins") for base in kind.__mro__
    )


class TimedIterator:
    """A wrapper for iterators that cannot be re-classed; everything but the fetch is the iterator's own."""

    __slots__ = ("__weakref__", "_iterator", "_next")
    _iterator: Iterator[object]
    _next: Callable[[Any], object]

    def __init__(self, iterator: Iterator[object], fetch: Callable[[Any], object]) -> None:
        object.__setattr__(self, "_iterator", iterator)
        object.__setattr__(self, "_next", fetch)

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> object:
        return self._next(self._iterator)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._iterator)  # what isinstance asks

    def __getattr__(self, name: str) -> object:
        return getattr(self._iterator, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._iterator, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._iterator, name)

    def __repr__(self) -> str:
        return repr(self._iterator)

    def __bool__(self) -> bool:
        return bool(self._iterator)

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __copy__(self) -> object:
        return copy.copy(self._iterator)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._iterator.__reduce_ex__(protocol)
