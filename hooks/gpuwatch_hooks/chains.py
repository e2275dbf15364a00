"""Linked lists: an object that refers to another of its class, and so on; a pair within a pair.

A walk that follows attributes by their names would come no further than it goes deep.
"""

from __future__ import annotations

from time import thread_time_ns
from typing import Any

import torch

from gpuwatch_hooks.namespace import is_own_module

SHORTEST = 8
"""Links from which it is one: what is shorter is seen as objects within objects."""

MOST_LINKS = 20_000
BETWEEN_CLOCKS = 256
MOST_ATTRIBUTES = 64
PAIR = 4
"""Elements of a tuple up to which another tuple in it is taken for the rest of a list."""

_MODULE_OF_CLASS = type.__dict__["__module__"].__get__


def links(thing: Any, kind: type, deadline: int) -> tuple[list[Any], bool]:
    """The objects of the linked list that begins here, and whether its end was reached; empty where there is none."""
    attribute = _next_attribute(thing, kind)
    chain: list[Any] = []
    if attribute is None:
        return chain, True
    seen: set[int] = set()
    link: Any = thing
    while type(link) is kind and id(link) not in seen:
        seen.add(id(link))
        chain.append(link)
        if len(chain) >= MOST_LINKS or (len(chain) % BETWEEN_CLOCKS == 0 and thread_time_ns() > deadline):
            return chain, False
        link = _following(link, kind, attribute)
    return (chain if len(chain) >= SHORTEST else []), True


def _next_attribute(thing: Any, kind: type) -> str | int | None:
    """The attribute, or the place in a tuple, where the next of its kind is."""
    if kind is tuple:
        parts = thing if len(thing) <= PAIR else ()
        return next((place for place, part in enumerate(parts) if type(part) is tuple), None)
    if issubclass(kind, (torch.nn.Module, torch.Tensor, type)) or not is_own_module(_MODULE_OF_CLASS(kind)):
        return None
    own = _dictionary(thing)
    names = own if len(own) <= MOST_ATTRIBUTES else ()
    return next((name for name in names if type(own[name]) is kind), None)


def _following(link: Any, kind: type, attribute: str | int) -> Any:
    if type(attribute) is int:
        return tuple.__getitem__(link, attribute) if tuple.__len__(link) > attribute else None
    return _dictionary(link).get(attribute)


def _dictionary(thing: Any) -> dict[Any, Any]:
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return own if type(own) is dict else {}
