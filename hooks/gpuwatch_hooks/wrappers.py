"""How a watched model is spread over devices and processes: which wrappers of torch it holds."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel


class Wrappers:
    """The wrappers of some models, found anew when asked: models are wrapped before attach or after."""

    def __init__(self) -> None:
        self.replicated: dict[str, list[int]] = {}
        self.sharded: weakref.ref[Any] | None = None
        self.waits_within = False  # forward and backward wait for other ranks themselves
        self._distributed: list[weakref.ref[DistributedDataParallel]] = []
        self._around: weakref.ref[DistributedDataParallel] | None = None

    def find(self, models: Iterable[torch.nn.Module]) -> None:
        """Look through all modules of these models."""
        sharding = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
        self.replicated, self._distributed, self.sharded = {}, [], None
        self.waits_within = False
        for model in models:
            for name, module in model.named_modules():
                # issubclass(type(...)): isinstance asks the object, and objects may lie.
                if issubclass(type(module), DistributedDataParallel):
                    self._distributed.append(weakref.ref(module))
                elif issubclass(type(module), DataParallel):
                    self.replicated[name or type(module).__name__] = list(module.device_ids)
                elif sharding is not None and self.sharded is None and issubclass(type(module), sharding):
                    self.sharded = weakref.ref(module)
                    self.waits_within = True
                elif issubclass(type(module), torch.nn.SyncBatchNorm):
                    self.waits_within = True
        if not self._distributed and self._around is not None:
            self._distributed.append(self._around)

    def entered(self, module: torch.nn.Module) -> None:
        """A watched module is called: by a DistributedDataParallel around it, where attach got what that one wraps."""
        around = DistributedDataParallel._active_ddp_module
        if around is not None and around.module is module and all(known() is None for known in self._distributed):
            self._around = weakref.ref(around)
            self._distributed = [self._around]

    def distributed(self) -> DistributedDataParallel | None:
        """The one DistributedDataParallel, None where there are several: whose gradients a backward reduces is open."""
        return self._distributed[0]() if len(self._distributed) == 1 else None

    def wrapped(self) -> bool:
        """Whether there was one when the models were looked through."""
        return bool(self._distributed)

    def reduces(self) -> bool | None:
        """Whether the backward of a forward that begins now reduces gradients across ranks; None if that is unknown."""
        wrapper = self.distributed()
        if wrapper is not None:
            return bool(wrapper.require_backward_grad_sync)
        sharded = None if self.sharded is None or self._distributed else self.sharded()
        if sharded is None:
            return None
        groups = getattr(sharded._get_fsdp_state(), "_fsdp_param_groups", None)
        return all(group.reduce_grads for group in groups) if groups else None
