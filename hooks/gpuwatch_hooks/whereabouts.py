"""Where in its step a rank is, told at every step: what it last did is one number in the header of its record.

When ranks wait for each other, nothing of theirs runs any more that could say who waits. So it is said before: as a
batch is asked for and comes, as autograd begins and returns, as an optimizer has stepped. The rank that never entered a
collective has the smallest number. A process alone says nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from gpuwatch.layout import PLACE_BITS, Place, Word
from gpuwatch_hooks.backward import leave_no_frame, wrap_autograd
from gpuwatch_hooks.pace import Pace
from gpuwatch_hooks.session import Session

_PLACE, _BACKWARD = int(Word.PLACE), int(Place.BACKWARD)
_ONE_BACKWARD = 1 << PLACE_BITS


def install(session: Session) -> Callable[[], None]:
    """Tell of every backward; the returned function stops it."""
    unwrap = wrap_autograd(lambda original: _told(session.pace, original))

    def restore() -> None:
        session.close_look()  # its own wrapper lies over this one
        unwrap()

    return restore


def _told(pace: Pace, run_backward: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(run_backward)
    def told_backward(*arguments: object, **options: object) -> object:
        # Two stores that cannot fail, not behind the guard: at every step this code runs cold.
        pace.words[_PLACE] = pace.place | _BACKWARD
        returned = False
        try:
            result = run_backward(*arguments, **options)
            returned = True
            return result
        finally:
            pace.place = pace.words[_PLACE] = pace.place + _ONE_BACKWARD
            if not returned:
                leave_no_frame()

    return told_backward
