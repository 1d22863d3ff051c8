"""What a function reads beside its arguments: its modules' parameters and buffers, autocast, torch's defaults; as found, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .replay import ReplayMismatch

_SMALL = 1 << 20
"""Bytes of a buffer up to which its values are copied before a forward pass whatever its dtype."""


_Slot = tuple[dict[str, Any], str, Tensor]
"""A parameter or buffer: the dict of its module that holds it, its name there, and itself."""


def devices_of(tensors: Iterable[Tensor]) -> set[torch.device]:
    """Devices on which something is computed; fake tensors draw no random numbers."""
    return {tensor.device for tensor in tensors if not isinstance(tensor, FakeTensor)}


class ModuleState:
    """Parameters and buffers of some modules, from before a forward pass on.

    Versions tell what changed. What the forward pass itself writes to is given to a replay as a copy, which is thrown away: buffers with
    the values that they had before the forward pass, so that the replay reads what that read, and all ends as after one forward pass.

    These values must be copied before anybody knows. That is done for buffers of floating dtypes wider than a byte (running statistics,
    codebooks) and for all up to 1 MiB (counters, flags, masks), not for big ones of small integers (packed weights); copies of what did
    not change are dropped after the forward pass. Batch norm's operators write to running statistics without a trace in their versions:
    one-dimensional buffers of floating dtypes are always taken for written to. Other writes without a trace cannot be seen.

    A parameter that the forward pass writes to (an embedding's with `max_norm`) is replayed from its value after it, which makes no
    difference where writing twice makes none.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._parameters, self._buffers = _slots(modules)
        self.tensors = [slot[2] for slot in self._parameters] + [slot[2] for slot in self._buffers]
        self._before = _versions(self.tensors)
        self._after: list[int] | None = None
        self._entries: list[tuple[_Slot, Tensor]] = []
        self._copies: dict[int, Tensor] = {}
        if self._buffers:
            with torch.no_grad():
                self._copies = {id(buffer): buffer.clone() for _, _, buffer in self._buffers if _worth_a_copy(buffer)}

    def settle(self) -> None:
        """Note, after the forward pass, what it wrote to. Raises NotImplementedError for a big packed buffer, whose old values are lost."""
        self._after = _versions(self.tensors)
        self._entries = self._values_before(self._after)
        self._copies = {}

    def _values_before(self, after: list[int]) -> list[tuple[_Slot, Tensor]]:
        """The buffers that were written to in place, with the values that they had. Who assigns a new one leaves the old one as it was."""
        entries = []
        for slot, old, new in zip(self._buffers, self._before[len(self._parameters) :], after[len(self._parameters) :], strict=True):
            buffer = slot[2]
            if old != new or _may_be_statistics(buffer):
                if id(buffer) not in self._copies:
                    raise NotImplementedError(
                        f"buffer {self._path(slot)} ({buffer.dtype}, {buffer.nbytes} bytes) is written to by the function; "
                        f"supported are buffers of floating dtypes of two bytes or more, and others up to {_SMALL} bytes"
                    )
                entries.append((slot, self._copies[id(buffer)]))
        return entries

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Run the body on parameters and buffers as the forward pass found them; afterwards all are as before the body.

        Raises ReplayMismatch for one that was changed in place since the forward pass.
        """
        if self._after is None:  # the forward pass differentiates, and is not over
            after = _versions(self.tensors)
            entries = self._values_before(after)
        else:
            after, entries = self._after, self._entries
            self._check_versions(after)
        written = [slot for slot, old, new in zip(self._parameters, self._before, after, strict=False) if old != new]
        values = [*entries, *((slot, slot[2]) for slot in written)]
        with torch.no_grad():  # by identity: one that is registered twice stays one
            stand_ins = {id(slot[2]): _copy(slot[2], tensor) for slot, tensor in values}
        present = [(place, name, place.get(name)) for place, name, _ in (*self._buffers, *written)]
        try:
            for place, name, tensor in (*self._buffers, *written):
                place[name] = stand_ins.get(id(tensor), tensor)
            yield
        finally:
            for place, name, found in present:
                place[name] = found

    def _check_versions(self, after: list[int]) -> None:
        present = _versions(self.tensors)
        if present == after:
            return
        known = {id(slot[2]) for slot, _ in self._entries}
        for index, slot in enumerate((*self._parameters, *self._buffers)):
            if present[index] != after[index] and id(slot[2]) not in known:
                kind = "parameter" if index < len(self._parameters) else "buffer"
                raise ReplayMismatch(
                    f"{kind} {self._path(slot)} was changed in place between the forward pass and its replay",
                    "call backward before the optimizer's step, and load weights before the forward pass.",
                )

    def _path(self, slot: _Slot) -> str:
        place, name, _ = slot
        for module in self._modules:
            for prefix, child in module.named_modules():
                if place is child._buffers or place is child._parameters:
                    return repr(f"{prefix}.{name}" if prefix else name)
        return repr(name)


def _slots(modules: Sequence[nn.Module]) -> tuple[list[_Slot], list[_Slot]]:
    """Of parameters, and of buffers. nn.Module's own iterators do the same several times slower."""
    parameters: list[_Slot] = []
    buffers: list[_Slot] = []
    seen: set[int] = set()
    stack: list[nn.Module | None] = list(modules)
    while stack:
        module = stack.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        for slots, place in (parameters, module._parameters), (buffers, module._buffers):
            for name, tensor in place.items():
                if tensor is not None:
                    slots.append((place, name, tensor))
        if module._modules:
            stack.extend(module._modules.values())
    return parameters, buffers


def _copy(place: Tensor, values: Tensor) -> Tensor:
    """A copy of `values` to stand at `place`: a parameter where that is one, for modules tell parameters from buffers by their class."""
    copied = values.clone().requires_grad_(values.requires_grad)
    if isinstance(place, nn.Parameter) and not isinstance(copied, nn.Parameter):
        return nn.Parameter(copied, values.requires_grad)
    return copied


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # inference tensors have none, and nobody can write to them
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _worth_a_copy(buffer: Tensor) -> bool:
    return not buffer.is_inference() and (buffer.nbytes <= _SMALL or (buffer.is_floating_point() and buffer.element_size() > 1))


def _may_be_statistics(buffer: Tensor) -> bool:
    return buffer.dim() == 1 and _worth_a_copy(buffer) and buffer.is_floating_point()


class Defaults(NamedTuple):
    """Autocast of some kinds of devices, torch's default dtype and device; those of the thread that asks."""

    autocast: list[tuple[str, torch.dtype | None]]
    """Kinds of devices, and the dtype that autocast computes in, None where it is off."""
    cache_enabled: bool
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def present(kinds: Iterable[str]) -> Defaults:
        """As they are now. `kinds` of devices that know no autocast are left out."""
        autocast = []
        for kind in kinds:
            if torch.amp.is_autocast_available(kind):
                autocast.append((kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None))
        made = torch.empty(0)  # faster than asking for the default device
        return Defaults(autocast, torch.is_autocast_cache_enabled(), made.dtype, made.device)

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Run the body under these, wherever it is called."""
        with contextlib.ExitStack() as stack:
            for kind, dtype in self.autocast:
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.cache_enabled))
                elif torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            present = torch.empty(0)
            if present.device != self.device:
                stack.enter_context(self.device)
            if present.dtype != self.dtype:
                stack.callback(torch.set_default_dtype, present.dtype)
                torch.set_default_dtype(self.dtype)
            yield
