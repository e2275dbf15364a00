"""One question to NVML. An answer that a device or a driver does not give is None.

NVML says so in three ways, all taken care of here: an error, a function that is missing, and a sentinel (all bits
set).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

SENTINELS = (2**32 - 1, 2**64 - 1)

NO_NVML = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
)
"""Errors that concern every device: NVML has to be opened again."""

NO_DEVICE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND)
"""Errors after which nothing that a device says can be believed."""


def ask(function: str, *arguments: Any) -> Any:
    """What NVML answers, None where it cannot; raises NVMLError for the loss of the device or of NVML."""
    call: Callable[..., Any] | None = getattr(pynvml, function, None)
    if call is None:
        return None  # an older pynvml
    try:
        return call(*arguments)
    except UnicodeDecodeError:
        return None
    except pynvml.NVMLError as error:
        if error.value in NO_NVML or error.value in NO_DEVICE:
            raise
        return None


def known(number: Any) -> int | None:
    """A whole number; None for none, or for a sentinel."""
    return None if number is None or int(number) in SENTINELS else int(number)


def scaled(number: Any, unit: float) -> float | None:
    """A number in base units, of which one of NVML's has ``unit``."""
    whole = known(number)
    return None if whole is None else whole * unit


def text(text: Any) -> str | None:
    """Text that is bytes or str, as the version of pynvml has it."""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text
