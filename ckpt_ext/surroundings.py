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


class _Slot(NamedTuple):
    """A parameter or buffer at the place where its module keeps it."""

    place: dict[str, Any]
    name: str
    tensor: Tensor
    is_buffer: bool


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
        self._slots = list(_slots(modules))
        self._before = [_version(slot.tensor) for slot in self._slots]
        with torch.no_grad():
            self._copies = {id(slot.tensor): slot.tensor.clone() for slot in self._slots if slot.is_buffer and _worth_a_copy(slot.tensor)}
        self._after: list[int] | None = None
        self._written: list[tuple[_Slot, Tensor | None]] = []

    def __bool__(self) -> bool:
        return bool(self._slots)

    def tensors(self) -> list[Tensor]:
        """All parameters and buffers."""
        return [slot.tensor for slot in self._slots]

    def settle(self) -> None:
        """Note, after the forward pass, what it wrote to. Raises NotImplementedError for a big packed buffer, whose old values are lost."""
        self._after = [_version(slot.tensor) for slot in self._slots]
        self._written = list(self._writes(self._after))
        self._copies = {}

    def _writes(self, versions: list[int]) -> Iterator[tuple[_Slot, Tensor | None]]:
        """What was written to, and with which values a replay begins: None for those that it has by then."""
        for slot, before, after in zip(self._slots, self._before, versions, strict=True):
            if not slot.is_buffer:
                if after != before:
                    yield slot, None
            elif after != before or _may_be_statistics(slot.tensor):
                if id(slot.tensor) not in self._copies:
                    raise NotImplementedError(
                        f"buffer {self._path(slot)} ({slot.tensor.dtype}, {slot.tensor.nbytes} bytes) is written to by the function; "
                        f"supported are buffers of floating dtypes of two bytes or more, and others up to {_SMALL} bytes"
                    )
                yield slot, self._copies[id(slot.tensor)]
            elif slot.place.get(slot.name) is not slot.tensor:
                yield slot, slot.tensor  # assigned anew: the old one has the old values

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Run the body on parameters and buffers as the forward pass found them; afterwards all are as before the body.

        Raises ReplayMismatch for one that was changed in place since the forward pass.
        """
        if self._after is None:  # the forward pass differentiates, and is not over
            written = list(self._writes([_version(slot.tensor) for slot in self._slots]))
        else:
            written = self._written
            self._check_versions(self._after)
        present = [(slot, slot.place.get(slot.name)) for slot in self._slots if slot.is_buffer]
        present += [(slot, slot.place.get(slot.name)) for slot, _ in written if not slot.is_buffer]
        stand_ins: dict[int, Tensor] = {}
        with torch.no_grad():
            for slot, entry in written:
                if id(slot.tensor) not in stand_ins:
                    value = slot.tensor if entry is None else entry
                    stand_ins[id(slot.tensor)] = value.clone().requires_grad_(slot.tensor.requires_grad)
        try:
            for slot, found in present:
                wanted = stand_ins.get(id(slot.tensor), slot.tensor)
                if found is not wanted:
                    slot.place[slot.name] = wanted
            yield
        finally:
            for slot, found in present:
                if slot.place.get(slot.name) is not found:
                    slot.place[slot.name] = found

    def _check_versions(self, after: list[int]) -> None:
        rewritten = {id(slot.tensor) for slot, _ in self._written if slot.is_buffer}
        for slot, version in zip(self._slots, after, strict=True):
            if _version(slot.tensor) != version and id(slot.tensor) not in rewritten:
                kind = "buffer" if slot.is_buffer else "parameter"
                raise ReplayMismatch(
                    f"{kind} {self._path(slot)} was changed in place between the forward pass and its replay",
                    "call backward before the optimizer's step, and load weights before the forward pass.",
                )

    def _path(self, slot: _Slot) -> str:
        for module in self._modules:
            for prefix, child in module.named_modules():
                if slot.place is child._buffers or slot.place is child._parameters:
                    return repr(f"{prefix}.{slot.name}" if prefix else slot.name)
        return repr(slot.name)


def _slots(modules: Sequence[nn.Module]) -> Iterator[_Slot]:
    # nn.Module's own iterators do the same several times slower, and make names.
    seen, stack = set(), list(modules)
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield _Slot(module._parameters, name, parameter, False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield _Slot(module._buffers, name, buffer, True)
        stack.extend(child for child in module._modules.values() if child is not None)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors have none


def _worth_a_copy(buffer: Tensor) -> bool:
    return not buffer.is_inference() and (buffer.nbytes <= _SMALL or (buffer.is_floating_point() and buffer.element_size() > 1))


def _may_be_statistics(buffer: Tensor) -> bool:
    return buffer.dim() == 1 and _worth_a_copy(buffer) and buffer.is_floating_point()


class _Autocast(NamedTuple):
    kind: str
    enabled: bool
    dtype: torch.dtype


class Defaults(NamedTuple):
    """Autocast of some kinds of devices, torch's default dtype and device; those of the thread that asks."""

    autocast: tuple[_Autocast, ...]
    cache_enabled: bool
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def present(kinds: Iterable[str]) -> Defaults:
        """As they are now. `kinds` of devices that know no autocast are left out."""
        autocast = tuple(
            _Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        )
        return Defaults(autocast, torch.is_autocast_cache_enabled(), torch.get_default_dtype(), torch.get_default_device())

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Run the body under these, wherever it is called."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.cache_enabled))
                elif torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            if (present := torch.get_default_dtype()) != self.dtype:
                stack.callback(torch.set_default_dtype, present)
                torch.set_default_dtype(self.dtype)
            yield
