"""How long the training thread could have run but got no core: the sign of a crowded machine.

The kernel keeps the sum per thread (``/proc/thread-self/schedstat``, second field, nanoseconds). Time that a hypervisor
takes comes to it. Slow steps that are explained by it are not the program's doing.
"""

from __future__ import annotations

import threading
from time import thread_time_ns

from gpuwatch.catalog import CPU_WAIT_SECONDS
from gpuwatch.interruption import expected
from gpuwatch.record import RecordWriter
from gpuwatch_hooks.guard import guarded
from gpuwatch_hooks.stolen import StolenTime


class CoreWait:
    """The training thread's wait for a core since attach."""

    def __init__(self, record: RecordWriter) -> None:
        self.record = record
        self._thread: tuple[int, int] | None = None  # whose sum, and what it was when first read
        self._earlier = 0
        self._total = 0
        self._stolen = StolenTime()

    @guarded("contention")
    def publish(self) -> None:
        """Write the sum, where this kernel keeps one. Called on the thread that trains."""
        reading = _run_delay()
        if reading is None:
            return
        thread, nanoseconds = reading
        if self._thread is None or self._thread[0] != thread:
            # Training moved to another thread: its sum begins at another number.
            self._thread = (thread, nanoseconds)
            self._earlier = self._total
            self._stolen.begin(thread_time_ns())
        self._total = self._earlier + nanoseconds - self._thread[1]
        stolen = self._stolen.note(thread_time_ns())
        self.record.values[self.record.series(CPU_WAIT_SECONDS.name)] = (self._total + stolen) / 1e9


def _run_delay() -> tuple[int, int] | None:
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return threading.get_ident(), int(file.read().split()[1])
    except expected(OSError, ValueError, IndexError):
        return None
