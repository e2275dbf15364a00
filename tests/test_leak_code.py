"""What the user's code tells of a holder: where it shrinks under another name, what is joined to it, where it grows."""

from __future__ import annotations

import collections
from collections import deque
from types import CodeType
from typing import Any

import pytest

from gpuwatch_hooks.bounds import TRIMMED, has_limit, limits_itself, shrinks, trims_itself
from gpuwatch_hooks.joins import CUT, JOINED, NEITHER, joins, writes
from gpuwatch_hooks.sites import grown_at
from gpuwatch_hooks.suspects import Known, Point, Verdict, grows, judge, keyed_by_places
from gpuwatch_hooks.walk import Holding


def code_of(text: str) -> list[CodeType]:
    return [compile(text, "train.py", "exec")]


@pytest.mark.parametrize(
    ("text", "bounded"),
    [
        ("def push(self, x):\n items = self.items\n items.append(x)\n del items[:len(items) - self.most]", True),
        ("def push(self, x):\n kept = self.items\n kept.append(x)\n if len(kept) > 9: kept.pop(0)", True),
        ("def push(self, x):\n kept = self.items\n kept.append(x)\n others.pop(0)", False),
        ("for x in y:\n kept = self.items\n kept.append(x)", False),
        ("heapq.heappush(self.items, x)\nif len(self.items) > 9: heapq.heappop(self.items)", True),
        ("if len(items) < most: heappush(items, x)\nelse: heapreplace(items, x)", True),
        ("heapq.heappush(items, heapq.heappop(others))", False),
        ("def trim(kept, most):\n del kept[:-most]\nitems.append(x)\ntrim(items, 9)", True),
        ("def trim(x, kept):\n kept.pop(0)\ntrim(x, self.items)", True),
        ("class A:\n def trim(self, kept): kept.pop(0)\n def push(self, x): self.trim(self.items)", True),
        ("def trim(kept, most):\n del kept[:-most]\ntrim(others, items)", False),
        ("del others[items[0]]", False),
        ("del items[min(items)]", True),
        ("def add(self, x):\n if len(self.items) >= 9: self.flush()\ndef flush(self):\n self.items.clear()", True),
        ("def add(self, x):\n if len(self.items) >= 9: self.flush()\ndef flush(self):\n print(self.items)", False),
        ("def show(kept):\n print(kept)\nshow(items)", False),
    ],
)
def test_a_container_that_is_trimmed_under_another_name_is_bounded(text: str, bounded: bool) -> None:
    assert shrinks("items", code_of(text), None, True) == (TRIMMED if bounded else "")


@pytest.mark.parametrize(
    ("text", "limited"),
    [
        ("items.append(x)\nif len(items) > 90_000: items.pop(0)", True),
        ("def trim(kept, most):\n while len(kept) > most: kept.popleft()\ntrim(self.items, 9)", True),
        ("self.items = self.items[-9:]", True),
        ("del items[:-most]", True),
        ("items.append(x)\ny = items.pop(0)", False),
        ("items.append(x)\ny = items[-9:]", False),
    ],
)
def test_code_that_goes_by_its_length_keeps_a_limit(text: str, limited: bool) -> None:
    assert has_limit("items", code_of(text), None) is limited


class Window(list[Any]):
    """Of the last few."""

    def append(self, item: object) -> None:
        """Add one; the oldest goes."""
        super().append(item)
        if len(self) > 9:
            self.pop(0)


class Log(list[Any]):
    """Of everything."""

    def append(self, item: object) -> None:
        """Add one."""
        super().append((len(self), item))


class Latest(collections.OrderedDict[Any, Any]):
    """Of the last few."""

    def __setitem__(self, key: object, item: object) -> None:
        super().__setitem__(key, item)
        if len(self) > 9:
            self.popitem(last=False)


@pytest.mark.parametrize(("thing", "bounded"), [(Window(), True), (Latest(), True), (Log(), False), ([], False)])
def test_a_container_that_trims_itself_is_bounded(thing: Any, bounded: bool) -> None:
    assert trims_itself(thing, isinstance(thing, list)) is bounded
    assert limits_itself(thing) is bounded


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bank = torch.cat([bank, x[:5]])", JOINED),
        ("self.bank = torch.cat([x.detach(), self.bank.to(x.device)])", JOINED),
        ("bank = torch.cat([bank if a else bank[-9:], x])", JOINED),
        ("self.bank[k] = np.concatenate([self.bank[k], x])", JOINED),
        ("bank = torch.cat([x.detach(), bank])[: self.k]", CUT),
        ("bank = torch.cat([x, bank], 1)[:, -9:].contiguous()", CUT),
        ("bank = torch.cat([bank[-n:], x.to(bank.device)])", CUT),
        ("bank = torch.cat([bank, x])\nif len(bank) > n: bank = bank[-n:]", CUT),
        ("y = torch.cat([bank, x])", NEITHER),
        ("other[k] = torch.cat([bank[k], x])", NEITHER),
        ("bank = bank + x", NEITHER),
    ],
)
def test_what_is_joined_has_a_limit_where_it_is_cut(text: str, kind: str) -> None:
    assert joins("bank", code_of(text), None) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("text += x", JOINED),
        ("def log(self, x): self.text = self.text + x", JOINED),
        ("text.extend(x)", JOINED),
        ("text = f'{text}{x}'", JOINED),
        ("text = x + y", NEITHER),
        ("print(text)", NEITHER),
    ],
)
def test_what_is_added_to_a_text(text: str, kind: str) -> None:
    assert writes("text", code_of(text), None) == kind


@pytest.mark.parametrize(
    "text", ["x = 1\nheapq.heappush(items, x)", "x = 1\ninsort(self.items, x)", "\nitems.write(x)"]
)
def test_the_line_at_which_it_grows(text: str) -> None:
    assert grown_at("items", code_of(text), None).startswith("train.py:2 (")


@pytest.mark.parametrize(
    ("keys", "places"),
    [
        ([7, 3, 12, 0, 5, 1, 2, 9, 8, 4, 11, 6, 10], True),
        (range(40), False),
        ([140_000_000_000 + key * 7 % 13 for key in range(13)], False),
        ([5, 4, 3], False),
        ([f"{key * 7 % 13}" for key in range(13)], False),
    ],
)
def test_a_dictionary_by_places_in_a_shuffled_data_set(keys: Any, places: bool) -> None:
    assert keyed_by_places(dict.fromkeys(keys)) is places


def points(lengths: list[tuple[int, int, int]]) -> deque[Point]:
    """Of (step, epoch, length)."""
    return deque(Point(step, epoch, length, length, 1_000 * length, None, False) for step, epoch, length in lengths)


EVERY_EPOCH = [(16 * number, number // 2, 4 * (number // 2)) for number in range(1, 12)]
FULL = [(16 * number, number // 2, 4 * min(3, number // 2)) for number in range(1, 12)]
BETWEEN = [(32, 2, 20), (64, 3, 40), (91, 3, 60), (113, 4, 60), (151, 5, 100), (181, 6, 120)]
RARELY = [(16 * number, number // 2, 4 * (number // 6)) for number in range(1, 12)]
SLOWING = [(16 * number, number // 2, 100 - 100 // (1 + number // 2) ** 2) for number in range(1, 12)]


@pytest.mark.parametrize(
    ("lengths", "leaks"), [(EVERY_EPOCH, True), (BETWEEN, True), (FULL, False), (RARELY, False), (SLOWING, False)]
)
def test_what_grows_once_an_epoch(lengths: list[tuple[int, int, int]], leaks: bool) -> None:
    assert grows(points(lengths)) is leaks


APPENDED = "items.append(x)"
POPPED = "items.append(x)\ny = items.pop(0)"
LIMITED = "items.append(x)\nif len(items) > 90_000: items.pop(0)"
CLEARED = "for epoch in epochs:\n items.clear()\n for x in y: items.append(x)"


@pytest.mark.parametrize(
    ("text", "steps", "epochs", "leaks"),
    [
        (APPENDED, 500, 1, True),
        (POPPED, 500, 1, False),
        (POPPED, 3_000, 1, True),
        (LIMITED, 60_000, 0, False),
        (CLEARED, 3_000, 1, False),
        (CLEARED, 3_000, 0, True),
        (CLEARED, 12_000, 1, True),
    ],
)
def test_how_long_a_container_may_fill_up(text: str, steps: int, epochs: int, leaks: bool) -> None:
    filled = points([(step, epochs, step) for step in range(0, steps + 1, steps // 10)])
    known = Known([], None, code_of(text), [], False, False, None)
    holding = Holding("items", "list", "train.py:1 (module)", steps, steps, steps, 1e6, False, None, None, False)
    assert (judge(holding, filled, 0.0, known) is Verdict.LEAK) is leaks
