"""Whose bytes these are: a stack folded to the user's own source line, and what the memory was for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuwatch.allocator.shapes import UNKNOWN_OWNER, Owner

FRAMES_LOOKED_AT = 400
LONGEST_NAME = 120

EMPTY_CACHE = "cache"
"""Category of what a call to ``torch.cuda.empty_cache`` did."""

_LIBRARY = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python3\.\d+|python3\.\d+)/|^<|(^|/)torch/(_|nn/|optim/|utils/|autograd/|"
    r"amp/|cuda/|distributed/|functional|tensor|storage|serialization)|^torch/|(^|/)(runpy|threading|contextlib|"
    r"functools|base_events|multiprocessing/\w+)\.py$"
)
"""Python files that are not the user's own."""

_INSTALLED = re.compile(r".*?(?:site-packages|dist-packages)/")

_CATEGORIES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (EMPTY_CACHE, re.compile(r"memory\.py empty_cache$")),
    ("communication", re.compile(r"(^|/)torch/distributed/|c10d::|ProcessGroupNCCL|^nccl")),
    ("backward", re.compile(r"torch::autograd::Engine::|Backward\d*::apply|(^|/)torch/autograd/(graph|__init__)\.py ")),
    ("optimizer", re.compile(r"(^|/)torch/optim/|(^|/)optim(izer|izers)?/\w+\.py |Optimizer\.step")),
    (
        "parameters",
        re.compile(r"module\.py (_apply|convert|to_empty)$|/nn/init\.py |reset_parameters$|load_state_dict$"),
    ),
    ("forward", re.compile(r"module\.py (_call_impl|_wrapped_call_impl)$|/nn/functional\.py ")),
)
"""What memory is for, by the frames that asked for it; the first that matches."""

_BACKWARD_NODE = re.compile(r"(\w+Backward\d*)::apply")


class Owners:
    """Owners of stacks. Torch writes one object for equal frames, so what a frame says is worked out once.

    Objects are told apart by identity: all that is passed in must stay alive as long as this is used.
    """

    def __init__(self) -> None:
        self._frames: dict[int, _Frame | None] = {}

    def of(self, frames: object) -> Owner:
        """The owner that a snapshot's list of frames (innermost first) names."""
        if not isinstance(frames, list | tuple):
            return UNKNOWN_OWNER
        known = self._frames
        first: _Frame | None = None
        mine: _Frame | None = None
        python: _Frame | None = None
        operation: _Frame | None = None
        node = ""
        rank = len(_CATEGORIES)
        for entry in frames[:FRAMES_LOOKED_AT]:
            try:
                frame = known[id(entry)]
            except KeyError:
                frame = known[id(entry)] = _frame(entry)
            if frame is None:
                continue
            first = first or frame
            rank = min(rank, frame.rank)
            if frame.python:
                python = python or frame
                if frame.mine:
                    mine = mine or frame
            else:
                node = node or frame.node
                if frame.operation:
                    operation = operation or frame
        if first is None:
            return UNKNOWN_OWNER
        category = _CATEGORIES[rank][0] if rank < len(_CATEGORIES) else "other"
        if mine is not None:
            return Owner(mine.place, category)
        if category == "backward":
            return Owner(f"(backward pass: {node or 'autograd engine'})", category)
        return Owner((python or operation or first).place, category)


@dataclass(frozen=True)
class _Frame:
    place: str
    python: bool
    mine: bool
    operation: bool
    node: str
    rank: int


def _frame(frame: object) -> _Frame | None:
    if not isinstance(frame, dict):
        return None
    name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
    if not isinstance(name, str) or not isinstance(file, str):
        return None
    name, file = name[: 4 * LONGEST_NAME], file[: 4 * LONGEST_NAME]
    python = file.endswith(".py") or file.startswith("<")
    text = f"{file} {name}" if python else name
    node = None if python else _BACKWARD_NODE.search(name)
    place = f"{_INSTALLED.sub('', file)[-LONGEST_NAME:]}:{line if type(line) is int else 0} {name[:LONGEST_NAME]}"
    return _Frame(
        place=place if python else f"(no Python frame: {name[:LONGEST_NAME]})",
        python=python,
        mine=python and not _LIBRARY.search(file),
        operation=name.startswith("at::_ops::"),
        node=node[1] if node else "",
        rank=next((rank for rank, (_, found) in enumerate(_CATEGORIES) if found.search(text)), len(_CATEGORIES)),
    )
