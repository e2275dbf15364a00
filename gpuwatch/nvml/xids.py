"""The driver's error events."""

from __future__ import annotations

import time
from typing import Any

import pynvml

from gpuwatch.nvml.asking import NO_NVML, ask, text

MOST_EVENTS = 64
"""Error events counted at one reading: a device in a storm of them must not hold up the others."""


Counts = tuple[tuple[int, int], ...]


class Xids:
    """The driver's error events, counted: NVML tells each once, and a value that sticks would say nothing."""

    def __init__(self) -> None:
        self._events: Any = None
        self._counts: dict[str, dict[int, int]] = {}
        self._last: dict[str, float] = {}
        self._listening: set[str] = set()

    def listen(self) -> None:
        """Ask for the events of every device; one that has none to give stays unknown."""
        self._events = None
        self._listening.clear()
        events = ask("nvmlEventSetCreate")
        if events is None:
            return
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                self._listening.add(str(text(pynvml.nvmlDeviceGetUUID(handle))))
            except pynvml.NVMLError as error:
                if error.value in NO_NVML:
                    raise
        self._events = events

    def collect(self) -> None:
        """Count what came since the last time; does not wait."""
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = str(text(pynvml.nvmlDeviceGetUUID(event.device)))
            except pynvml.NVMLError as error:
                if error.value in NO_NVML:
                    raise
                return  # none left, which NVML calls a timeout; or a device is lost, which its own reading will say
            counts = self._counts.setdefault(uuid, {})
            counts[int(event.eventData)] = counts.get(int(event.eventData), 0) + 1
            self._last[uuid] = time.time()

    def of(self, uuid: str | None) -> tuple[Counts | None, float | None]:
        """Codes with their counts, None where nobody listens; and when the last one came."""
        if uuid is None or (uuid not in self._listening and uuid not in self._counts):
            return None, None
        return tuple(sorted(self._counts.get(uuid, {}).items())), self._last.get(uuid)
