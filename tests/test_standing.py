"""How far a rank is: from what it last did in its step, and from what the kernel says of one that is silent."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gpuwatch import standing as module
from gpuwatch.layout import BACKWARD_BITS, PLACE_BITS, Place, State
from gpuwatch.reader import Snapshot, read
from gpuwatch.standing import standing
from tests.recorded import write_run


@pytest.fixture
def rank(tmp_path: Path) -> Snapshot:
    """A living rank of two, after 200 steps."""
    snapshot = read(write_run(tmp_path, world_size=2, state=None).path)
    return dataclasses.replace(snapshot, up=True, progress_age=0.0)


def at(snapshot: Snapshot, place: Place, backwards: int = 0, steps: int = 200) -> float:
    """The same rank at a place."""
    word = (steps << BACKWARD_BITS | backwards) << PLACE_BITS | place
    far = standing(dataclasses.replace(snapshot, place=word))
    assert far is not None
    return far


def test_a_step_goes_from_the_batch_to_the_next_step(rank: Snapshot) -> None:
    order = [at(rank, place) for place in (Place.STEPPED, Place.ASKED, Place.CAME, Place.BACKWARD)]
    order += [at(rank, place, 1) for place in (Place.STEPPED, Place.ASKED, Place.CAME, Place.BACKWARD)]
    order += [at(rank, Place.STEPPED, 2), at(rank, Place.BACKWARD, (1 << BACKWARD_BITS) - 1)]
    assert order == sorted(set(order)) and order[0] == 200 and order[-1] < 201


@pytest.mark.parametrize("steps", [0, 199, 201, (1 << 44) - 1])
def test_a_place_in_another_step_says_nothing(steps: int, rank: Snapshot) -> None:
    assert at(rank, Place.BACKWARD, steps=steps) == 200


def test_a_rank_that_ended_is_behind_those_that_went_on_and_ahead_of_those_that_did_not(rank: Snapshot) -> None:
    ended = standing(dataclasses.replace(rank, up=False, state=State.CLEAN))
    assert ended is not None and at(rank, Place.STEPPED) < ended < at(rank, Place.ASKED)
    assert standing(dataclasses.replace(rank, up=False, state=State.RUNNING)) is None


def test_of_silent_ranks_at_one_place_the_one_that_does_not_wait_is_behind(
    rank: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = dataclasses.replace(rank, progress_age=400.0)
    far = {}
    for elsewhere in (True, False):
        monkeypatch.setattr(module, "not_waiting", lambda _, found=elsewhere: found)
        far[elsewhere] = at(silent, Place.CAME)
        assert at(rank, Place.CAME) == at(silent, Place.CAME) - (0 if elsewhere else 0.01)  # not asked before
    assert far[True] < far[False] < at(rank, Place.BACKWARD)
