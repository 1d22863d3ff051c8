"""What tensors cost: the bytes alive while operators run, the bytes that autograd keeps for backward, and a ledger of a training step.

All count storages, once each, whatever views share them, on real tensors of any device and on fake ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import host
from .ledger import Ledger as Ledger
from .ledger import estimate as estimate
from .ledger import measure as measure
from .storages import storages


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operators make while it is on, each from its birth to its death.

        with LiveStorages() as memory:
            loss = model(x).sum()
            between = memory.live
            loss.backward()
        print(between, memory.peak)

    Storages that were there before (parameters, inputs) do not count, nor do those handed to `ignore`, nor buffers in the host's memory
    (`ckpt_ext.host`), which stand apart. Scratch memory inside one operator is not seen, and a storage counts with its size at birth. Under
    a fake-tensor mode, enter this one inside.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now. Goes on falling as tensors die after the mode has ended."""
        self.peak = 0
        """The most bytes that were alive at the end of an operator, with its operands."""
        self.host = 0
        """Bytes of the host buffers alive now."""
        self.host_peak = 0
        self._counted: dict[int, int] = {}
        for tensor in ignored:
            self.ignore(tensor)

    def ignore(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` no longer, or never."""
        for storage in storages(tensor):
            self._meet(storage, 0)
            self.live -= self._counted[storage._cdata]
            self._counted[storage._cdata] = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: the operators that it calls on what it wraps come here
        kwargs = kwargs or {}
        # An operand that no operator has returned was born outside: it must not be taken for new when it, or a view of it, comes back.
        for storage in storages((args, kwargs)):
            self._meet(storage, 0)
        result = func(*args, **kwargs)
        for storage in storages(result):
            if host.is_buffer(func):
                self._meet_on_host(storage)
            else:
                self._meet(storage, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _meet(self, storage: UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._counted:
            return
        self._counted[key] = size
        self.live += size
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.live -= self._counted.pop(key)

    def _meet_on_host(self, storage: UntypedStorage) -> None:
        size = storage.nbytes()
        self._meet(storage, 0)
        self.host += size
        self.host_peak = max(self.host_peak, self.host)
        weakref.finalize(storage, self._forget_on_host, size).atexit = False

    def _forget_on_host(self, size: int) -> None:
        self.host -= size


def saved_bytes(forward: Callable[[], object], ignored: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd keeps for backward once `forward()` has returned, less the storages of `ignored`.

    Sees what goes through saved-tensor hooks, so all of `save_for_backward` and of PyTorch's own operators; a tensor that a Function hides
    on its `ctx` shows up in `LiveStorages` only. A saved view counts with the whole storage that it keeps alive.
    """
    packed: list[weakref.ref[UntypedStorage]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.extend(weakref.ref(storage) for storage in storages(tensor))
        return tensor.detach()  # an operator's own result would hold the graph that holds it, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # holds the graph, and through it what is saved
    kept = {storage._cdata: storage.nbytes() for ref in packed if (storage := ref()) is not None}
    for storage in storages(list(ignored)):
        kept.pop(storage._cdata, None)
    del result
    return sum(kept.values())


def activation_peak(step: Callable[[], object], model: nn.Module, ignored: Iterable[Tensor] = ()) -> int:
    """The most bytes alive in `step()`, a forward and backward pass of `model`, beside its parameters, their gradients once these are
    handed over, and the storages of `ignored`."""
    memory = LiveStorages([*model.parameters(), *model.buffers(), *ignored])
    with ExitStack() as stack:
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: memory.ignore(p.grad))
                stack.callback(hook.remove)
        with memory:
            step()
    return memory.peak
