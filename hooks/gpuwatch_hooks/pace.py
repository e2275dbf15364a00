"""The resting hooks: what runs at every step, and is kept to almost nothing.

Between two looks only three moments of a step are noted: the loader is asked, the loader has answered, an optimizer has
stepped. Each note is one integer in a list, worked through later in one go: code that runs once in a step of real work
finds cold caches and costs five to ten times what it costs in a loop (measured: the same bookkeeping done at each event
added 60 us to a step of 360 us, noting the moments and replaying them adds a fraction of that).

A *look* is one step with all hooks in place: forward, backward and optimizer are told apart, and the probes look at
gradients, switches and graphs. The first steps of a run are all looked at, later one in :data:`LOOK_EVERY`, rarer
or more often by what a look costs beside a step; a switch to
eval mode and the end of an epoch open a look too, so that an evaluation is seen.
"""

from __future__ import annotations

from collections import deque

from gpuwatch.layout import BACKWARD_BITS, PLACE_BITS, Word
from gpuwatch.record import RecordWriter

BEGIN, END, STEP, PAUSE = 0, 1, 2, 3
"""Kinds of a note, in its two lowest bits. END is followed by a second integer, the batch's elements or -1; PAUSE (of
the garbage collector) by its nanoseconds."""

KIND_BITS = 2
OPTIMIZER_BITS = 4
SHIFT = KIND_BITS + OPTIMIZER_BITS
MOST_OPTIMIZERS = 1 << OPTIMIZER_BITS

LOOK_EVERY = 32
DENSE_STEPS = 64
"""Steps at the start of a run that are all looked at: short runs get the whole picture."""

SETTLED_STEPS = 512
"""Steps after which looks come four times as rarely."""

LOOK_NANOSECONDS = 600_000
"""What a look adds to its step (measured: 572 us)."""

LOOK_SHARE = 0.001
"""Share of a run's time that looks may take: of long steps more are looked at, up to one in :data:`HURRIED_EVERY`."""

SHORT_STEPS_SHARE = 0.005
"""The share that looks shall not exceed where steps are so short that one in 128 takes more: then they are rarer."""

RAREST_EVERY = 256

HURRIED_EVERY = 8
"""Steps between looks while something suspicious is followed up."""

MOST_NOTES = 1 << 14

_PLACE, _STEP_SHIFT = int(Word.PLACE), PLACE_BITS + BACKWARD_BITS


class Pace:
    """The notes of the resting hooks and the state they need at each step."""

    __slots__ = (
        "_rested", "looking", "looks", "mask", "next_look", "next_tick", "note", "notes", "place", "several", "steps",
        "words",
    )  # fmt: skip

    def __init__(self, record: RecordWriter) -> None:
        self.notes: deque[int] = deque(maxlen=MOST_NOTES)  # bounded, should nobody come to work through it
        self.note = self.notes.append
        self.looking = False
        self.looks = 0
        self.steps = 0
        self.mask = 0  # optimizers that have stepped since the last fetch, a bit each
        self.next_look = 0
        self.next_tick = 0
        self.words = record.words
        self.several = record.identity.get("world_size", 1) != 1  # ranks: each says where in its step it is
        self.place = 0  # what of that changes once a step or a backward
        self._rested = (0, 0)  # step and nanoseconds of the last time that looking ended

    def stepped(self, steps: int) -> None:
        """So many steps are complete: a place in a step counts from here."""
        if steps != self.place >> _STEP_SHIFT:  # else another optimizer stepped, in the same step
            self.place = self.words[_PLACE] = steps << _STEP_SHIFT

    def rest_until(self, steps: int, now: int, hurried: bool = False) -> None:
        """The next look is due about :data:`LOOK_EVERY` steps from here; not exactly, lest it beat with the run.

        Later in a run of short steps looks grow rarer: what there is to see has been seen, and a step in 128 is enough
        to go by. Where steps are long, looks cost next to nothing, and a change shall not go unseen for an hour.
        """
        every = LOOK_EVERY if steps < SETTLED_STEPS else 4 * LOOK_EVERY
        before, then = self._rested
        self._rested = steps, now
        if then and steps > before:
            share_of_each = LOOK_NANOSECONDS * (steps - before) / max(1, now - then)  # a look's time beside a step's
            every = min(every, max(HURRIED_EVERY, int(share_of_each / LOOK_SHARE)))
            if steps >= SETTLED_STEPS:
                every = max(every, min(RAREST_EVERY, int(share_of_each / SHORT_STEPS_SHARE)))
        if hurried:
            every = HURRIED_EVERY
        self.looks += 1
        self.next_look = steps + every - 3 + self.looks * 5 % 7  # seven looks: an odd number of steps
