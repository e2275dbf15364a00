"""Other Python threads of the process: how busy they are, and whether they make the training thread wait for its turn.

Only one thread of a process runs Python at a time (the GIL). A thread that computes in a library may let it go, and is
no trouble then; so before anything is said of a busy thread, the training thread lets go of the GIL for a millisecond,
a few times at the end of a step, and measures how long it takes to have it back. A thread that wants it keeps it for
5 ms (``sys.getswitchinterval``). On a run without a busy thread this is never done.

Torch's own threads (pin memory, autograd) are not counted, nor are threads in which no code of the user's runs.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from time import monotonic_ns

import torch

from gpuwatch.catalog import LOCAL_RANKS, OTHER_THREAD_CORES, TORCH_THREADS
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.place import user_place

RULE = "comp-gil-contention"

BUSY_SHARE = 0.5
WINDOW_NANOSECONDS = 60_000_000_000
"""How far back a thread's use of the CPU is averaged."""

Usage = tuple[int, int]
"""Nanoseconds on a core so far, and nanoseconds ready without one (``/proc/.../schedstat``)."""

FEWEST_NANOSECONDS = 300_000_000
READ_EVERY = 100_000_000
TURNS = 4
AGAIN_NANOSECONDS = 60_000_000_000
"""Time after which a thread's turns are measured again."""

OWN = "/proc/thread-self/schedstat"
LET_GO_SECONDS = 0.001
LONG_TURN_SECONDS = 0.002


class BusyThread:
    """What is known of one thread."""

    def __init__(self, thread: threading.Thread) -> None:
        self.name = thread.name
        self.ident = thread.ident
        self.tid = thread.native_id
        self.readings: deque[tuple[int, Usage]] = deque()  # with the time of each
        self.turns: list[float] = []  # seconds, of the last settled question
        self.measured: list[float] = []  # of the open one
        self.next_check = 0
        self.place = ""
        self.said = False

    def read(self, now: int) -> None:
        """Take another reading; one that has ended uses no more."""
        used = usage(f"/proc/self/task/{self.tid}/schedstat")
        if used is None:
            used = self.readings[-1][1] if self.readings else (0, 0)
        self.readings.append((now, used))
        while now - self.readings[0][0] > WINDOW_NANOSECONDS:
            self.readings.popleft()

    def cores(self) -> float | None:
        """Cores that it kept busy in the window; None where that is too short to tell."""
        lasted, on_core, _ = self._window()
        return on_core / lasted if lasted >= FEWEST_NANOSECONDS else None

    def share(self) -> float:
        """Share of its time that it computes. Waits for a core are left out: they are the doing of others."""
        lasted, on_core, ready = self._window()
        left = max(lasted - ready, on_core)
        return on_core / left if lasted >= FEWEST_NANOSECONDS and left else 0.0

    def _window(self) -> tuple[int, int, int]:
        """Nanoseconds of the window, those on a core, those ready without one."""
        if not self.readings:
            return 0, 0, 0
        (then, before), (now, after) = self.readings[0], self.readings[-1]
        return now - then, after[0] - before[0], after[1] - before[1]

    def busy(self) -> bool:
        """Whether it computes for half of its time."""
        return self.share() >= BUSY_SHARE

    def unsure(self, now: int) -> bool:
        """Whether it is to be found out if training waits for it."""
        return now >= self.next_check and bool(self.place) and self.busy()

    def measure(self, now: int) -> None:
        """Measure one turn; after some of them the question is settled for a while."""
        self.measured.append(time_of_turn())
        if len(self.measured) >= TURNS:
            self.turns, self.measured = self.measured, []
            self.next_check = now + AGAIN_NANOSECONDS

    def holds_up(self) -> bool:
        """Whether it was found to make the training thread wait."""
        return bool(self.turns) and statistics.median(self.turns) >= LONG_TURN_SECONDS


class ThreadProbe:
    """Reads the use of the CPU of each Python thread but the one that trains."""

    def __init__(self, record: RecordWriter, local_ranks: int) -> None:
        self.record = record
        self.known: dict[int, BusyThread] = {}
        self._next_reading = 0
        record.values[record.series(LOCAL_RANKS.name)] = local_ranks

    def suspicious(self) -> bool:
        """Whether turns are to be measured: then steps are looked at in a row."""
        now = monotonic_ns()
        return any(thread.unsure(now) for thread in self.known.values())

    @guarded("threads")
    def step_end(self) -> None:
        """A step ended during a look. Called on the thread that trains."""
        now = monotonic_ns()
        if now >= self._next_reading and threading.active_count() > 1:
            self._read(now)
        for thread in self.known.values():
            if thread.unsure(now):
                thread.measure(now)

    @guarded("threads")
    def publish(self) -> None:
        """Write how busy they are, and which of them makes training wait."""
        values = self.record.values
        values[self.record.series(TORCH_THREADS.name)] = torch.get_num_threads()
        self._read(monotonic_ns())
        used = [cores for thread in self.known.values() if (cores := thread.cores()) is not None]
        if used or not self.known:
            values[self.record.series(OTHER_THREAD_CORES.name)] = sum(used)
        for thread in self.known.values():
            if thread.said or thread.holds_up():
                thread.said = True
                turn = 1000 * statistics.median(thread.turns)
                evidence = f'thread "{thread.name}"; the training thread waits {turn:.1f} ms for its turn'
                self.record.observe(RULE, thread.place, evidence, thread.share() if thread.holds_up() else 0.0)

    def _read(self, now: int) -> None:
        self._next_reading = now + READ_EVERY
        living = {thread.native_id: thread for thread in python_threads() if thread.native_id}
        for tid, thread in living.items():
            if tid not in self.known:
                self.known[tid] = BusyThread(thread)
        for tid, known in list(self.known.items()):
            known.read(now)
            if tid not in living and not known.said:
                del self.known[tid]
        unplaced = [thread for thread in self.known.values() if thread.busy() and not thread.place]
        if unplaced:
            frames = sys._current_frames()
            for known in unplaced:
                frame = frames.get(known.ident) if known.ident else None
                known.place = user_place(frame) if frame is not None else ""


def python_threads() -> Iterator[threading.Thread]:
    """The threads that Python started, but the calling one and torch's own."""
    own = threading.get_ident()
    for thread in threading.enumerate():
        # A dummy stands for a thread of C++ that once called into Python, as autograd's do.
        if thread.ident == own or isinstance(thread, threading._DummyThread):
            continue
        target = getattr(thread, "_target", None)
        module = getattr(target, "__module__", None) or type(thread).__module__
        if not str(module).startswith(("torch.", "gpuwatch")):
            yield thread


def time_of_turn() -> float:
    """Seconds that the calling thread waits for the GIL after it let it go; its waits for a core are taken off."""
    before = usage(OWN)
    began = time.perf_counter()
    time.sleep(LET_GO_SECONDS)
    waited = time.perf_counter() - began - LET_GO_SECONDS
    after = usage(OWN)
    return waited - (after[1] - before[1]) / 1e9 if before and after else waited


def usage(path: str) -> Usage | None:
    """What the kernel has counted for a thread; None where it has ended, or this kernel does not count."""
    try:
        with open(path, "rb") as file:
            on_core, ready, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return on_core, ready
