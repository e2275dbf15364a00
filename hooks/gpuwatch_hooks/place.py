"""Where in the user's program something happens: the nearest frame that is neither torch's nor ours."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType, TracebackType

import torch

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FOREIGN = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    _OURS,
    sysconfig.get_paths()["stdlib"] + os.sep,
    "<frozen",
)
DEEPEST = 64
"""Frames looked at."""


def is_foreign(file: str) -> bool:
    """Whether code in this file is torch's, the standard library's or ours."""
    return file.startswith(_FOREIGN)


def place_of_traceback(trace: TracebackType | None) -> str:
    """The innermost place of the user's that an exception came through, or an empty text."""
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not is_foreign(file) and "site-packages" not in file:
            place = f"{os.path.basename(file)}:{trace.tb_lineno} ({trace.tb_frame.f_code.co_name})"
        trace = trace.tb_next
    return place


def user_place(frame: FrameType | None = None) -> str:
    """``file.py:line (function)`` of the nearest frame of the user's, or an empty text.

    Code in site-packages counts as the user's only when nothing nearer to the program's own files is on the stack.
    """
    frame = frame or sys._getframe(1)
    fallback = ""
    for _ in range(DEEPEST):
        if frame is None:
            break
        name = frame.f_code.co_filename
        if not is_foreign(name):
            place = f"{os.path.basename(name)}:{frame.f_lineno} ({frame.f_code.co_name})"
            if "site-packages" not in name:
                return place
            fallback = fallback or place
        frame = frame.f_back
    return fallback
