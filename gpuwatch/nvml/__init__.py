"""What the GPUs say about themselves: the only package that calls NVML, through pynvml."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from gpuwatch.nvml.gpu import GpuReading
from gpuwatch.nvml.unavailable import MISSING, NvmlUnavailable

if TYPE_CHECKING:
    from gpuwatch.nvml.driver import Driver

__all__ = ["GpuReading", "Nvml", "NvmlUnavailable"]

LIBRARY = "libnvidia-ml.so.1"
"""What a driver brings, and pynvml loads."""


class Nvml:
    """NVML, opened at the first read and again whenever the driver went away and came back. For one thread."""

    def __init__(self) -> None:
        self._driver: Driver | None = None

    def read(self) -> list[GpuReading]:
        """Every GPU that answers, by index. Raises NvmlUnavailable; the next call tries afresh."""
        if self._driver is None:
            try:
                ctypes.CDLL(LIBRARY)
            except OSError:
                raise NvmlUnavailable(MISSING) from None
            from gpuwatch.nvml.driver import Driver  # with pynvml 3 MB, which a machine without a GPU keeps

            self._driver = Driver()
        return self._driver.read()

    def close(self) -> None:
        """Give NVML up; the next read opens it again."""
        if self._driver is not None:
            self._driver.close()
