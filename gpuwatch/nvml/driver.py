"""NVML as pynvml gives it."""

from __future__ import annotations

import contextlib
from typing import Any

import pynvml

from gpuwatch.nvml.asking import NO_NVML
from gpuwatch.nvml.gpu import GpuReading
from gpuwatch.nvml.reading import read_device
from gpuwatch.nvml.unavailable import MISSING, NvmlUnavailable
from gpuwatch.nvml.xids import Xids


class Driver:
    """NVML, opened at the first read and again whenever the driver went away and came back. For one thread."""

    def __init__(self) -> None:
        self._opened = False
        self._xids = Xids()

    def read(self) -> list[GpuReading]:
        """Every GPU that answers, by index. Raises NvmlUnavailable; the next call tries afresh."""
        try:
            if not self._opened:
                pynvml.nvmlInit()
                self._opened = True
                self._xids.listen()
            self._xids.collect()
            readings = [_device(index, self._xids) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.close()
            raise NvmlUnavailable(_why(error)) from None
        return [reading for reading in readings if reading is not None]

    def close(self) -> None:
        """Give NVML up; the next read opens it again."""
        if self._opened:
            self._opened = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def _why(error: Any) -> str:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return MISSING
    if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "no GPU telemetry: the NVIDIA driver is not loaded"
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "no GPU telemetry: NVML and the loaded driver differ in version; restart the daemon after the update"
    return f"no GPU telemetry: NVML says {str(error)!r}"


def _device(index: int, xids: Xids) -> GpuReading | None:
    """A device's reading, None when the device is lost; raises NVMLError only for what concerns all devices."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return read_device(index, handle, xids)
    except pynvml.NVMLError as error:
        if error.value in NO_NVML:
            raise
        return None
