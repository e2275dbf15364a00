"""What a hypervisor takes: a virtual core that stands still under what runs on it.

That shows neither as CPU time nor as a wait for a core. The kernel counts it for the machine alone (``steal`` of
``/proc/stat``), so a thread's part is taken to be in proportion to its CPU time.
"""

from __future__ import annotations

from time import monotonic_ns, perf_counter_ns

from gpuwatch.interruption import expected

STAT = "/proc/stat"
RAN = (0, 1, 2, 5, 6)
"""Its fields of time that something ran: user, nice, system and the two kinds of interrupts. Guests are in these."""

STEAL = 7
EVERY_NANOSECONDS = 900_000_000
NEVER_YET_NANOSECONDS = 30_000_000_000
"""Time between two readings where nothing was ever stolen: most often there is no hypervisor."""

READING_SHARE = 2000
"""A reading is not repeated before this many times what it took: the kernel counts over all its cores for it."""


class Machine:
    """Ticks of all cores together, since the machine started, as they were last read."""

    def __init__(self) -> None:
        self.ran = self.stolen = 0
        self._due = 0

    def read(self) -> None:
        """Read them again, if it is time to."""
        now = monotonic_ns()
        if now < self._due:
            return
        begun = perf_counter_ns()
        self.ran, self.stolen = ticks()
        took = perf_counter_ns() - begun
        self._due = now + max(EVERY_NANOSECONDS if self.stolen else NEVER_YET_NANOSECONDS, READING_SHARE * took)


def ticks() -> tuple[int, int]:
    """Ticks that something ran, and those that were stolen from it; zeros where the kernel does not tell."""
    try:
        with open(STAT, "rb") as file:
            fields = [int(field) for field in file.readline().split()[1:]]
        return sum(fields[field] for field in RAN), fields[STEAL]
    except expected(OSError, ValueError, IndexError):
        return 0, 0


machine = Machine()


class StolenTime:
    """What was stolen from something, from the CPU time that it used."""

    def __init__(self) -> None:
        self.nanoseconds = 0
        self._last: tuple[int, int, int] | None = None  # CPU time; ticks that ran, and stolen ones

    def begin(self, cpu: int) -> None:
        """Another thread goes on, which has used this much CPU time before."""
        machine.read()
        self._last = cpu, machine.ran, machine.stolen

    def note(self, cpu: int) -> int:
        """Nanoseconds so far, of something that has used this much CPU time by now."""
        if self._last is None:
            self.begin(cpu)
        machine.read()
        now = cpu, machine.ran, machine.stolen
        used, ran, stolen = (max(0, after - before) for after, before in zip(now, self._last or now, strict=True))
        if ran:
            self._last = now
            self.nanoseconds += used * stolen // ran
        return self.nanoseconds
