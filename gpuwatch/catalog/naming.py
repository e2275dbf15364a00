"""How a metric is named, by whose reading it is; and the label values that are fixed."""

from __future__ import annotations

from gpuwatch.expr import SCOPES as SCOPES
from gpuwatch.expr import Metric

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Where a training step's time goes. ``other`` is what is left: loss, clipping, logging, user code."""

STEP_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 10.0)
"""Upper bounds of the step-time histogram, in seconds; the last bucket is open. Each costs a fleet a series a rank."""

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations")
"""What a model's memory is: the last is what its forward saved for backward."""

OOM_KINDS = ("capacity", "fragmentation", "foreign", "spike", "leak", "host", "killed")
"""Kinds of running out of memory; ``killed`` is by the kernel."""

CLOCK_REASONS = {
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "hw_slowdown": 0x08,
    "sw_power_cap": 0x04,
}
"""Why a GPU's clock is held down, and NVML's bit for it (nvml.h, ``nvmlClocksEventReason*``)."""

GRAVE_XIDS = {
    48: "double-bit memory error",
    63: "memory row remapped",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
}
"""Error codes of the driver after which the device needs an operator, and what they mean (NVIDIA's list of XIDs)."""


def rank_metric(name: str, kind: str, unit: str, help: str, *labels: str) -> Metric:
    """A reading of one rank; carries ``run`` and ``rank``."""
    return Metric(f"gpuwatch_{name}", kind, unit, help, "rank", labels)


def gpu_metric(name: str, kind: str, unit: str, help: str, *labels: str) -> Metric:
    """A reading of one GPU; carries ``gpu`` and ``uuid``."""
    return Metric(f"gpuwatch_gpu_{name}", kind, unit, help, "gpu", labels)


def node_metric(name: str, kind: str, unit: str, help: str, *labels: str) -> Metric:
    """A reading of the daemon itself."""
    return Metric(f"gpuwatch_{name}", kind, unit, help, "node", labels)
