"""Is a name that holds tensors a leak? From what it held at each search, its limit, and what code does to it."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from gpuwatch_hooks.bounds import EMPTIED, TRIMMED, has_limit, identifier, limits_itself, shrinks, trims_itself
from gpuwatch_hooks.bytecode import uses_global
from gpuwatch_hooks.joins import CUT, JOINED, joins, writes
from gpuwatch_hooks.referents import FEW, NEWEST
from gpuwatch_hooks.walk import Holding

SPAN_STEPS = 48
SEARCHES = 4
EPOCHS = 5
"""Epochs in each of which it must have grown, where it does not grow within them."""

KEPT_POINTS = 12
SLOWEST_SHARE = 1 / 3
"""The last rise, of the average one: what slows down is filling up."""

LEAST_PARTS_PER_STEP = 0.2
"""Growth of the parts of a container whose own length stays the same: less is a change of what is in it."""

PATIENCE_STEPS = 2_000
"""Steps after which a container is reported although some code takes elements out of it, whatever its length."""

EPOCH_PATIENCE_STEPS = 10_000
"""The same in a first epoch that goes on, where code empties it: at the epoch's end, most likely."""

HIGHEST_PLACE = 1 << 31
"""Whole numbers below are places in a data set, rather than addresses or hashes."""

SHORT_EPOCH = 50
"""An epoch of so many steps is waited for: what is kept for one is cleared at its end."""


@dataclass(frozen=True)
class Known:
    """What else is known of a name: its object, the one it belongs to, the user's code, and the loop it is in.

    ``codes`` are on the stack, ``functions`` are others of the user's modules. ``epoch_steps``: steps of the last epoch
    that ended; None while there was none.
    """

    thing: Any
    owner: Any
    codes: Iterable[CodeType]
    functions: Iterable[CodeType]
    varying: bool
    in_data_set: bool
    epoch_steps: int | None

    def elsewhere(self, name: str) -> list[CodeType]:
        """Functions that are not on the stack and use the global variable of this name."""
        return [code for code in self.functions if uses_global(code, name)]


class Verdict(enum.Enum):
    """What a name is: not growing, growing but too early to tell, growing towards a limit (or full), or a leak."""

    STEADY = "steady"
    EARLY = "early"
    BOUNDED = "bounded"
    LEAK = "leak"


@dataclass(frozen=True)
class Point:
    """What a name held at a step. ``span``: the steps that the graph of a single tensor goes back."""

    step: int
    epochs: int
    length: int
    parts: float
    pinned_bytes: float
    span: float | None
    single: bool
    tensors: float = 0.0


def judge(holding: Holding, points: deque[Point], peak: float, known: Known) -> Verdict:
    """What the name is; code is looked at only where the answer depends on it."""
    if holding.limit is not None and holding.length <= holding.limit:
        return Verdict.BOUNDED
    if holding.single and holding.reach is None:
        return _judge_joined(holding, points, known)
    series = amounts(points)
    if len(series) < 2 or (series[-1] <= series[-2] and not grows_by_epochs(points)):
        # It may be full: a program's own limit is no limit that the container tells of.
        if holding.graph and not holding.single and _trimmed(holding, known):
            return Verdict.BOUNDED
        return Verdict.STEADY
    if holding.reach is None and _ends_somewhere(holding, points, known):
        return Verdict.BOUNDED
    if not grows(points) or series[-1] <= 2 * peak:
        return Verdict.BOUNDED if peak else Verdict.EARLY
    return Verdict.LEAK


def _judge_joined(holding: Holding, points: deque[Point], known: Known) -> Verdict:
    """A single tensor that grows is one that something is joined to; others follow the batch's size. So do texts."""
    plain = not holding.tensors
    if (known.varying and not plain) or not grows(points):
        return Verdict.STEADY
    if plain and _ends_somewhere(holding, points, known):
        return Verdict.BOUNDED
    name = identifier(holding.name)
    kind = (writes if plain else joins)(name, [*known.codes, *known.elsewhere(name)], known.owner)
    return Verdict.LEAK if kind == JOINED else Verdict.BOUNDED if kind == CUT else Verdict.STEADY


def _trimmed(holding: Holding, known: Known) -> bool:
    return _shrinks(holding, known) == TRIMMED


def _shrinks(holding: Holding, known: Known) -> str:
    """What code does to it; elsewhere than on the stack only what limits it counts: who knows whether it is emptied."""
    name, is_list = identifier(holding.name), holding.kind == "list"
    kind = shrinks(name, known.codes, known.owner, is_list, known.functions)
    if kind != TRIMMED and trims_itself(known.thing, is_list):
        return TRIMMED
    return TRIMMED if kind != TRIMMED and shrinks(name, known.elsewhere(name), None, is_list) == TRIMMED else kind


def _ends_somewhere(holding: Holding, points: deque[Point], known: Known) -> bool:
    """Whether its growth may end yet: at the epoch's end, or because code takes elements out."""
    outlived = len(points) > 1 and points[-2].epochs > points[0].epochs
    if not outlived and (known.in_data_set or (known.epoch_steps or SHORT_EPOCH + 1) <= SHORT_EPOCH):
        return True
    span = points[-1].step - points[0].step
    in_epoch = not outlived and points[-1].epochs > 0
    if not outlived and holding.parts == holding.length and keyed_by_places(known.thing):
        return in_epoch or span < PATIENCE_STEPS
    kind = _shrinks(holding, known)
    if kind == EMPTIED:
        return not outlived and span < (EPOCH_PATIENCE_STEPS if in_epoch else PATIENCE_STEPS)
    return kind == TRIMMED and (span < PATIENCE_STEPS or _has_limit(holding, known))


def _has_limit(holding: Holding, known: Known) -> bool:
    name = identifier(holding.name)
    return (
        has_limit(name, known.codes, known.owner, known.functions)
        or has_limit(name, known.elsewhere(name), None)
        or limits_itself(known.thing)
    )


def keyed_by_places(thing: Any) -> bool:
    """Whether a dictionary's newest keys are places in a data set that is shuffled: as many as there are, at most."""
    if not issubclass(type(thing), dict):
        return False
    newest = list(itertools.islice(dict.__reversed__(thing), NEWEST))
    if len(newest) < NEWEST or any(type(key) is not int or not 0 <= key < HIGHEST_PLACE for key in newest):
        return False
    return any(earlier > later for later, earlier in itertools.pairwise(newest))


def amounts(points: Iterable[Point]) -> list[float]:
    """What is compared: steps of a graph, bytes of a single tensor, a container's length, or the parts within it.

    The parts while it is small enough to count them: a list for each class, a dictionary of lists.
    """
    known = list(points)
    if known[-1].span is not None:
        return [point.span or 0.0 for point in known]
    if known[-1].single:
        return [point.pinned_bytes for point in known]
    # Those before had no more, or it has shrunk; many lists that are always the same number are counted by a sample.
    if known[-1].length <= FEW or known[0].length == known[-1].length:
        return [point.parts for point in known]
    return [float(point.length) for point in known]


def shrank(before: Point, now: Point) -> bool:
    """Whether something was taken out."""
    pair = amounts([before, now])
    return pair[1] < pair[0]


def grows(points: deque[Point]) -> bool:
    """Whether it grew at every search, or in every epoch, over enough steps, and not much slower at last."""
    series, some = amounts(points), list(points)
    if any(later <= earlier for earlier, later in itertools.pairwise(series)):
        return grows_by_epochs(points)
    return len(series) >= SEARCHES and _goes_on(series, some, series[-2], some[-2])


def grows_by_epochs(points: deque[Point]) -> bool:
    """The same of what something is added to at the end of each epoch only: an evaluation's results.

    A search between two epochs may see the results of the one and be counted to the other.
    """
    series, some = amounts(points), list(points)
    epochs: dict[int, list[float]] = {}
    for point, amount in zip(some, series, strict=True):
        epochs.setdefault(point.epochs, []).append(amount)
    known = list(epochs.values())
    if len(known) < EPOCHS or any(later[-1] <= earlier[0] for earlier, later in itertools.pairwise(known)):
        return False
    two_ago = next(at for at, point in enumerate(some) if point.epochs == list(epochs)[-3])
    return _goes_on(series, some, series[two_ago], some[two_ago])


def _goes_on(series: list[float], some: list[Point], before: float, at: Point) -> bool:
    """Whether it grew over enough steps, and since that point not much slower than on the whole."""
    steps = some[-1].step - some[0].step
    if steps < SPAN_STEPS:
        return False
    whole = (series[-1] - series[0]) / steps
    last = (series[-1] - before) / (some[-1].step - at.step)
    of_parts = some[0].length == some[-1].length and not some[-1].single
    return last >= SLOWEST_SHARE * whole and (not of_parts or whole >= LEAST_PARTS_PER_STEP)


def growing(points: deque[Point]) -> bool:
    """Whether it grew at the last two searches: no suspect yet, but worth another look soon."""
    last = amounts(points)[-3:]
    return len(last) == 3 and last[0] < last[1] < last[2] and not (points[-1].single and points[-1].span is None)


def settled(points: deque[Point], point: Point) -> bool:
    """Whether a container of containers has stopped to grow itself: from now on its parts count."""
    same = points[-1].length == point.length != points[0].length
    return same and point.length > FEW and point.parts != point.length


def rose_tensors(points: deque[Point]) -> float:
    """Tensors a step that it grew by since the search before."""
    if len(points) < 2:
        return 0.0
    return (points[-1].tensors - points[-2].tensors) / (points[-1].step - points[-2].step)


def rose(points: deque[Point]) -> float:
    """Bytes a step that it grew by since the search before."""
    if len(points) < 2:
        return 0.0
    return (points[-1].pinned_bytes - points[-2].pinned_bytes) / (points[-1].step - points[-2].step)
