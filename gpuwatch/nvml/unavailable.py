"""No NVML at the moment."""

from __future__ import annotations


class NvmlUnavailable(RuntimeError):
    """No NVML at the moment; the text is one line that says why."""


MISSING = "no GPU telemetry: libnvidia-ml.so.1 was not found, so no NVIDIA driver is installed here"
