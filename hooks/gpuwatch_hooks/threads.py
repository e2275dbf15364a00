"""Other Python threads of the process: how busy they are, and whether they make the training thread wait for its turn.

Only one thread of a process runs Python at a time (the GIL). A thread that computes in a library may let it go, and is
no trouble then. What tells the two apart is a glance at the end of a step: while the training thread runs Python, and
so has the GIL, one that needs it sleeps, and one that does not goes on. Where that one has no core, the training thread
goes through a call that lets go of the GIL, as each operator of torch's does: only a thread that needs it takes it
then, and keeps it for 5 ms (``sys.getswitchinterval``). Nothing here sleeps, or waits for anything but its own turn.
Some glances settle the question for a minute, and on a run without a busy thread there is none.

Torch's own threads (pin memory, autograd) are not counted, nor are threads in which no code of the user's runs.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from time import clock_gettime_ns, monotonic_ns, perf_counter_ns, thread_time_ns

import torch

from gpuwatch.catalog import LOCAL_RANKS, OTHER_THREAD_CORES, TORCH_THREADS
from gpuwatch.interruption import expected
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
OWN = "/proc/thread-self/schedstat"
AGAIN_NANOSECONDS = 60_000_000_000
"""Time after which it is asked again whether a thread needs the GIL."""

GLANCE_NANOSECONDS = 60_000
"""How long a glance takes at least: a thread that was woken, and finds the GIL taken, is asleep again by then."""

INTERRUPTED_NANOSECONDS = 100_000
"""A glance in which the training thread was off its core for longer says nothing: it may have lost the GIL."""

CALLS = 4
"""Calls that let go of the GIL, until one is answered late: a thread that needs it must be awake to take it."""

LONG_TURN_NANOSECONDS = 2_000_000
GLANCES = 6
"""Glances after which the question is settled."""

TAKING_SHARE = 0.6
"""Of them, those that found a thread in need of the GIL, from which it is said."""


class BusyThread:
    """What is known of one thread."""

    def __init__(self, thread: threading.Thread) -> None:
        self.name = thread.name
        self.ident = thread.ident
        self.tid = thread.native_id
        self.readings: deque[tuple[int, Usage]] = deque()  # with the time of each
        self.glances: list[bool] = []  # of the open question: did it need the GIL?
        self.needs_turns = False  # by the last one that was settled
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

    def glance(self, now: int) -> None:
        """See whether it works while the calling thread runs Python; after some glances the question is settled."""
        asleep = asleep_meanwhile(self.tid)
        self.glances.append(turn_is_taken() if asleep is None else asleep)
        if len(self.glances) >= GLANCES:
            self.needs_turns = sum(self.glances) >= TAKING_SHARE * len(self.glances)
            self.glances = []
            self.next_check = now + AGAIN_NANOSECONDS


class ThreadProbe:
    """Reads the use of the CPU of each Python thread but the one that trains."""

    def __init__(self, record: RecordWriter, local_ranks: int) -> None:
        self.record = record
        self.known: dict[int, BusyThread] = {}
        self._next_reading = 0
        record.values[record.series(LOCAL_RANKS.name)] = local_ranks

    def suspicious(self) -> bool:
        """Whether glances are to be taken: then steps are looked at in a row."""
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
                thread.glance(now)

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
            if thread.said or thread.needs_turns:
                thread.said = True
                turn = 1000 * sys.getswitchinterval()
                evidence = (
                    f'thread "{thread.name}"; it stands still while the training thread runs Python: they take turns, '
                    f"of up to {turn:.0f} ms"
                )
                self.record.observe(RULE, thread.place, evidence, thread.share() if thread.needs_turns else 0.0)

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


def asleep_meanwhile(tid: int | None) -> bool | None:
    """Whether a thread sleeps while the calling one runs Python (True), or is at work (False); None where unsure.

    It is unsure where the calling thread was off its core, for it may have lost the GIL; and where the other one would
    run and has no core.
    """
    own, before, begun = thread_time_ns(), time_on_core(tid), perf_counter_ns()
    while perf_counter_ns() - begun < GLANCE_NANOSECONDS:
        pass
    state, after = state_of(tid), time_on_core(tid)
    took = perf_counter_ns() - begun
    if before is None or after is None or took - (thread_time_ns() - own) > INTERRUPTED_NANOSECONDS:
        return None
    if after - before > took / 2:
        return False
    return True if state == "S" else None


def turn_is_taken() -> bool:
    """Whether another thread takes the GIL as soon as the calling one lets go of it. Waits for a core are taken off."""
    for _ in range(CALLS):
        before, begun = usage(OWN), perf_counter_ns()
        os.sched_yield()
        took, after = perf_counter_ns() - begun, usage(OWN)
        if before and after and took - (after[1] - before[1]) >= LONG_TURN_NANOSECONDS:
            return True
    return False


def time_on_core(tid: int | None) -> int | None:
    """Nanoseconds that a thread of this process was on a core; None where it has ended, or the system does not tell.

    The number of its clock is made as the kernel's headers do (``MAKE_THREAD_CPUCLOCK``, for the scheduler's clock):
    that of a thread which has ended is refused, and asking lets go of nothing.
    """
    if tid is None:
        return None
    try:
        return clock_gettime_ns(~tid << 3 | 6)
    except expected(OSError):
        return None


_c = ctypes.PyDLL(None)  # its functions are called without letting go of the GIL


def state_of(tid: int | None) -> str:
    """The kernel's letter for what a thread does: R for one that runs or would, S for one that sleeps; else empty.

    Read without letting go of the GIL, which would wake the thread that waits for it.
    """
    file = _c.open(f"/proc/self/task/{tid}/stat".encode(), os.O_RDONLY | os.O_CLOEXEC)
    if file < 0:
        return ""
    text = ctypes.create_string_buffer(256)
    _c.read(file, text, 255)
    _c.close(file)
    return text.value.rpartition(b") ")[2][:1].decode()


def usage(path: str) -> Usage | None:
    """What the kernel has counted for a thread; None where it has ended, or this kernel does not count."""
    try:
        with open(path, "rb") as file:
            on_core, ready, *_ = map(int, file.read().split())
    except expected(OSError, ValueError):
        return None
    return on_core, ready
