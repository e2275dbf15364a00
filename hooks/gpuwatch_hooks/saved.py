"""What one forward saves for backward, by module: measured once in several hundred steps.

For that one forward every module has a hook that says which module runs, and torch's hooks on saved tensors tell of
each tensor that autograd keeps. The tensors go in and come out as they are: a detached alias of the same storage (torch
itself asks for that, the tensor would keep itself alive through its own graph), with torch's check for changes in place
made here, since torch leaves it out under such hooks.

Where the hooks could be noticed nothing is measured: under the user's own hooks on saved tensors, in compiled or
scripted code, inside functorch, and with parameters of special kinds or with attributes of their own, which a custom
function could look for on what it saved.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gpuwatch_hooks.guard import guarded

AFTER = "(loss)"
"""Where what is saved between the model's return and backward is entered."""

MOST_MODULES = 4_096
_autograd: Any = torch._C._autograd
_NEEDED = (
    "_push_saved_tensors_default_hooks",
    "_pop_saved_tensors_default_hooks",
    "_top_saved_tensors_default_hooks",
    "_saved_tensors_hooks_is_enabled",
    "_saved_tensors_hooks_disable",
)
_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{kind} "
    "{shape}] is at version {now}; expected version {then} instead."
)
Packed = tuple[torch.Tensor, int]


class SavedTensors:
    """One measurement. ``bytes_by_module`` counts each storage once, where it was first saved."""

    def __init__(self, root: torch.nn.Module, excluded: set[int], device: str) -> None:
        self._root = weakref.ref(root)  # what is measured is not kept alive
        self.prefix = "module." if isinstance(root, torch.nn.parallel.DistributedDataParallel) else ""
        self.excluded = excluded
        self.device = device
        self.stack: list[str] = [""]
        self.bytes_by_module: dict[str, int] = {}
        self.total = 0
        self.reached: dict[str, int] = {}  # what had been saved in all when the module returned
        self.savers: dict[int, list[str]] = {}
        self.sizes: dict[int, int] = {}
        self.through: dict[str, tuple[int, int]] = {}  # storages that went in and came out
        self.foreign = False  # somebody else's hooks took some tensors away
        self.counting = False
        self.pushed = False
        self.calls = 0
        self._handles: list[RemovableHandle] = []
        self._disable: Callable[..., object] | None = None
        self._step_aside: Callable[..., object] | None = None
        self._under = 0  # modules entered below a checkpoint

    @property
    def root(self) -> torch.nn.Module | None:
        """The measured model, None when it is gone."""
        return self._root()

    # -- beginning and end -------------------------------------------------------------------------------------------

    def begin(self, root: torch.nn.Module) -> None:
        """The root's forward begins."""
        for path, module in hookable(root):
            self._handles.append(module.register_forward_pre_hook(_Enter(self, path)))
            self._handles.append(module.register_forward_hook(_Leave(self, path)))
        self._disable = disable = _autograd._saved_tensors_hooks_disable

        def step_aside(*arguments: object, **options: object) -> object:
            # functorch is about to forbid such hooks, and would refuse to work while there are any.
            step_aside_for_functorch(self)
            return disable(*arguments, **options)

        _autograd._saved_tensors_hooks_disable = step_aside
        self._step_aside = step_aside
        _autograd._push_saved_tensors_default_hooks(self._pack, _unpack)
        self.pushed = self.counting = True

    def after_forward(self) -> bool:
        """Whether the root has returned, and nothing else is being measured than the loss."""
        return self.stack == [AFTER]

    def returned(self) -> None:
        """The root's forward returned: what is saved from now on belongs to the loss."""
        self._unhook()
        self.reached[""] = self.total
        self.stack = [AFTER]

    def end(self) -> bool:
        """Backward begins, or the step is over; False while somebody else's hooks lie above ours."""
        self.counting = False
        self._unhook()
        if self.pushed:
            top = _autograd._top_saved_tensors_default_hooks(False)
            if top is None or top[0] != self._pack:
                return False
            _autograd._pop_saved_tensors_default_hooks()
            self.pushed = False
        if self._disable is not None:
            if _autograd._saved_tensors_hooks_disable is self._step_aside:
                _autograd._saved_tensors_hooks_disable = self._disable
            self._disable = self._step_aside = None  # it refers to this object, and with it to the user's model
        return True

    def give_up(self) -> None:
        """Stop at once, and believe nothing of it."""
        self.foreign = True
        self.end()

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    # -- events ------------------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Packed:
        if self.counting:
            count(self, tensor)
        version = -1 if tensor.is_inference() else tensor._version
        return (tensor if tensor.grad_fn is None else tensor.detach()), version

    def enter(self, path: str, arguments: tuple[object, ...]) -> None:
        """A module is called."""
        self.calls += 1
        self.stack.append(path)
        if self._under:
            self._under += 1
            return
        top = _autograd._top_saved_tensors_default_hooks(False)
        if top is None or top[0] == self._pack:
            return
        if "_checkpoint_hook" in getattr(top[0], "__qualname__", ""):
            # A checkpoint keeps what the part got, and nothing from within.
            self._under = 1
            for argument in arguments:
                if issubclass(type(argument), torch.Tensor):
                    count(self, argument)  # type: ignore[arg-type]
        else:
            self.foreign = True

    def leave(self, path: str, arguments: tuple[object, ...], output: object) -> None:
        """It returned; modules that raised are passed over."""
        while len(self.stack) > 1 and self.stack.pop() != path:
            pass
        self.reached[path] = self.total
        if self._under:
            self._under -= 1
        if arguments and type(arguments[0]) is torch.Tensor and type(output) is torch.Tensor:
            self.through[path] = storage_of(arguments[0]), storage_of(output)


@guarded("modules")
def count(saved: SavedTensors, tensor: torch.Tensor) -> None:
    """Autograd keeps a tensor."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return
    if tensor.layout != torch.strided or tensor.device.type != saved.device:
        return
    key = storage_of(tensor)
    if not key or key in saved.excluded:
        return
    path = saved.stack[-1]
    savers = saved.savers.get(key)
    if savers is not None:
        savers.append(path)
        return
    saved.savers[key] = [path]
    size = saved.sizes[key] = tensor.untyped_storage().nbytes()
    saved.total += size
    saved.bytes_by_module[path] = saved.bytes_by_module.get(path, 0) + size


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory it looks into; 0 for a tensor without any."""
    if tensor.layout != torch.strided:
        return 0
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _unpack(packed: Packed) -> torch.Tensor:
    tensor, version = packed
    if version >= 0 and tensor._version != version:
        raise RuntimeError(
            _CHANGED.format(kind=tensor.type(), shape=list(tensor.shape), now=tensor._version, then=version)
        )
    return tensor


class _Enter:
    """Forward pre-hook of a module, for one forward; a copy of the module gets a harmless one in its place."""

    def __init__(self, saved: SavedTensors, path: str) -> None:
        self.saved = saved
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __call__(self, module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        if self.saved.counting:
            entered(self.saved, self.path, arguments)


class _Leave(_Enter):
    """Forward hook of a module, for one forward."""

    def __call__(self, module: torch.nn.Module, arguments: tuple[object, ...], output: object = None) -> None:
        if self.saved.counting:
            left(self.saved, self.path, arguments, output)


@guarded("measuring")
def step_aside_for_functorch(saved: SavedTensors) -> None:
    """Somebody forbids hooks on saved tensors; guarded apart, so that it works when the measuring has failed."""
    saved.give_up()


@guarded("modules")
def entered(saved: SavedTensors, path: str, arguments: tuple[object, ...]) -> None:
    """A module is called."""
    saved.enter(path, arguments)


@guarded("modules")
def left(saved: SavedTensors, path: str, arguments: tuple[object, ...], output: object) -> None:
    """It returned."""
    saved.leave(path, arguments, output)


# -- where it can be done ----------------------------------------------------------------------------------------------


def hookable(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules below the root that a hook does not change: a fused path that minds hooks is left alone."""
    waiting = [(name, child) for name, child in root.named_children()]
    seen = {id(root)}
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
            continue
        seen.add(id(module))
        if not module.training and isinstance(module, _FUSED):
            continue
        yield path, module
        waiting.extend((f"{path}.{name}", child) for name, child in module.named_children())


_FUSED = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)


def measurable(root: torch.nn.Module) -> bool:
    """Whether this forward can be measured without anybody noticing. Asked for once in several hundred steps."""
    if not all(hasattr(_autograd, name) for name in _NEEDED) or isinstance(root, torch.nn.DataParallel):
        return False
    if not _autograd._saved_tensors_hooks_is_enabled() or _autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    if compiled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return False
    for number, module in enumerate(root.modules()):
        if number >= MOST_MODULES or hasattr(module, "_orig_mod"):
            return False
        if vars(module).get("_compiled_call_impl") is not None:
            return False
    return all(type(parameter) is torch.nn.Parameter and not vars(parameter) for parameter in root.parameters())


def compiled() -> bool:
    """Whether anything of this process has been compiled: hooks could make it be compiled again."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    counter: Any = getattr(frames, "FRAME_COUNTER", 0)
    return bool(counter)
