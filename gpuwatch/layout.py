"""The bytes of a flight record: what is where. Shared by the writer and the reader; holds no code that does anything.

One file per rank, every number 8 bytes and aligned, native byte order (writer and reader are on one machine):

======  ==========================================================================================
offset  content
======  ==========================================================================================
0       header: a magic, then 8-byte words (:class:`Word`)
4096    values: float64, one per series; NaN is "not known"
...     ring: the recent steps, a row of float64 each (:class:`Column`)
...     observations: fixed slots, each guarded by a sequence number
...     schema: a JSON line with the run's identity, then a JSON line per series, ``[name, labels]``
======  ==========================================================================================

A word or a value is stored with one aligned 8-byte store, so a reader never sees half of it. What is longer is
published by a counter that is stored after it.
"""

from __future__ import annotations

import enum
import struct

MAGIC = b"GPUWREC1"
VERSION = 1
SUFFIX = ".gpw"
SNAPSHOT_SUFFIX = ".pickle"
"""A memory snapshot of the run, beside its record under the same name."""

POST_MORTEMS = "post-mortem"
"""Directory, beside the records, of what the daemon wrote down of ranks that died without an end mark."""

MODULE_ROW = "module_row"
"""Series of a record that make up its table of modules: read for the report, published by nobody."""

WORKER_ROW = "worker_row"
"""The same for its table of loader workers."""

HEADER_BYTES = 4096
VALUE_CAPACITY = 1024
RING_ROWS = 2048
OBSERVATION_SLOTS = 64
OBSERVATION_BYTES = 1024
SCHEMA_BYTES = 64 << 10


class Word(enum.IntEnum):
    """Index of an 8-byte word of the header."""

    MAGIC = 0
    VERSION = 1
    SERIES = 2  # how many series are published
    SCHEMA_USED = 3  # how many bytes of schema text are published
    PID = 4  # as the writer sees it
    START_TIME = 5  # field 22 of /proc/self/stat: tells a pid from its successor
    CREATED = 6  # Unix time, nanoseconds
    HEARTBEAT = 7  # CLOCK_MONOTONIC nanoseconds of the last thing a hook saw
    STEP = 8  # completed training steps
    STEP_TIME = 9  # CLOCK_MONOTONIC nanoseconds of the last completed step
    PHASE = 10
    STATE = 11
    RING_HEAD = 12  # rows ever written
    OBSERVATIONS = 13  # slots in use
    ATTACHED = 14  # CLOCK_MONOTONIC nanoseconds at attach
    ENDED = 15  # Unix time of the end mark, nanoseconds
    PLACE = 16  # of one rank among several: where in which step it is (:class:`Place`)


class State(enum.IntEnum):
    """How far the run got; everything from CLEAN on is an end mark."""

    STARTING = 0
    RUNNING = 1
    CLEAN = 2
    EXCEPTION = 3
    DETACHED = 4


class Phase(enum.IntEnum):
    """What the training thread is doing."""

    OTHER = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    EPOCH_START = 5
    EVALUATION = 6
    PENDING = 7  # a forward in eval mode with gradients: training or evaluation, a backward will tell
    BETWEEN = 8


class Place(enum.IntEnum):
    """What a rank last did in a step, as far as every step tells: the lowest bits of its word.

    Above them stand the backwards that the step has had, above these the completed steps: of ranks that run the same
    program the one with the smallest word is furthest behind.
    """

    STEPPED = 0  # an optimizer stepped, or a backward returned
    ASKED = 1  # for a batch
    CAME = 2  # the batch did
    BACKWARD = 3  # autograd runs


PLACE_BITS = 2
BACKWARD_BITS = 18
"""Bits of a place's word: for :class:`Place`, and for the backwards of a step above them."""


class Column(enum.IntEnum):
    """A step in the ring. Times in seconds; NaN where a phase was not seen."""

    END = 0  # CLOCK_MONOTONIC
    NUMBER = 1
    TOTAL = 2  # evaluation and the first fetch of an epoch left out
    DATA = 3
    FORWARD = 4
    BACKWARD = 5
    OPTIMIZER = 6
    EPOCH_START = 7
    GC = 8
    ELEMENTS = 9  # of the first tensor of the batch or of the model's input
    TAGS = 10


class Tag(enum.IntFlag):
    """Why a step is left out of medians."""

    EPOCH_START = 1
    EVALUATION = 2
    GC = 4
    COMPILE = 8


ROW = struct.Struct(f"{len(Column)}d")
SLOT = struct.Struct("QQdQ")
"""Head of an observation: sequence (odd while it is written), bytes of text, magnitude, step."""

VALUES_AT = HEADER_BYTES
RING_AT = VALUES_AT + 8 * VALUE_CAPACITY
OBSERVATIONS_AT = RING_AT + ROW.size * RING_ROWS
SCHEMA_AT = OBSERVATIONS_AT + OBSERVATION_SLOTS * OBSERVATION_BYTES
RECORD_BYTES = SCHEMA_AT + SCHEMA_BYTES
"""Size of every record."""
