"""Regions that keep only their inputs: autograd's hooks on saved tensors, and the replay that makes these tensors again.

What a region's forward pass would save is dropped, and numbered. The first of these tensors that backward asks for starts a replay, which
fills all of them, in the same order, and stops at the last.

1. Only the innermost region has a tensor; its inputs are saved as tensors of the region around it. To replay a region is thus to
   replay those around it first.
2. A replayed tensor is handed out once and forgotten. Who asks for it again, in this backward pass or the next, starts another replay.
3. A replay begins as if no region were around it. A backward pass inside of it works on its own graph.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .checksums import checksum

_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
# Replays set generators that all threads share: one at a time, or they would not be put back right. A thread may replay inside a replay.
_ONE_AT_A_TIME = threading.RLock()
_TORCH = os.path.dirname(torch.__file__)


class ReplayMismatch(RuntimeError):
    """A replay that did not, or could not, repeat its forward pass. The message names the tensor and ends with a tip."""

    def __init__(self, what: str, tip: str) -> None:
        super().__init__(f"{what}\nTip: {tip}")


class _Filled(BaseException):
    """Ends a replay that has made all that is needed. No Exception, for the replayed code may catch these."""


class _Inputs(torch.autograd.Function):
    """Saves tensors, under whatever hooks are on, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise AssertionError("nothing is computed from a region's inputs as such")


class _Holder:
    """Stands in the graph for a saved tensor: a number, and the tensor between a replay and its use."""

    __slots__ = ("__weakref__", "index", "value", "version")

    def __init__(self, index: int) -> None:
        self.index = index
        self.value: Tensor | None = None
        self.version = 0


class _Look(NamedTuple):
    """What a replayed tensor must look like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> _Look:
        return _Look(x.shape, x.dtype, x.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} on {self.device}"


class Region:
    """One call of a function that keeps `tensors`, its inputs, and calls `replay(*tensors)` again in backward.

    `with region.forward(): ...` runs the call. `check_values` compares checksums of all tensors; `modules` name the places in messages.
    """

    def __init__(
        self,
        replay: Callable[..., object],
        tensors: Sequence[Tensor],
        *,
        check_values: bool = False,
        modules: Sequence[torch.nn.Module] = (),
    ) -> None:
        self._function = replay
        self._inputs = _Inputs.apply(_ANCHOR, *tensors).grad_fn
        # Weak, and with no hold on the storage: who changes an input can be named as long as somebody has it.
        self._versions = [(weakref.ref(tensor), tensor._version) for tensor in tensors]
        self._holders: list[weakref.ref[_Holder]] = []
        self._looks: list[_Look] = []
        self._checksums: list[Tensor] | None = [] if check_values else None
        self._modules = modules

    def forward(self) -> saved_tensors_hooks:
        """The hooks that number what the forward pass saves, and drop it."""
        return saved_tensors_hooks(self._keep, self._give)

    def _keep(self, x: Tensor) -> _Holder:
        holder = _Holder(len(self._holders))
        self._holders.append(weakref.ref(holder))
        self._looks.append(_Look.of(x))
        if self._checksums is not None:
            self._checksums.append(checksum(x))
        return holder

    def _give(self, holder: _Holder) -> Tensor:
        with _ONE_AT_A_TIME:
            if holder.value is None:
                self._replay()
            value, holder.value = holder.value, None
        assert value is not None
        if value._version != holder.version:
            raise ReplayMismatch(
                f"the saved tensor {holder.index} ({_Look.of(value)}) was changed in place by the region, after an operation had saved it",
                "autograd refuses this without checkpointing, too. Use the operation that makes a new tensor.",
            )
        return value

    def _replay(self) -> None:
        tensors = self._unpacked_inputs()
        needed = len(self._holders)  # fewer than there will be, where the forward pass itself differentiates
        again = _Again(self, needed)
        try:
            # Under hooks that hand back what they get: a backward pass inside of the region works on the replay's graph.
            with saved_tensors_hooks(again.refill, _same), torch.enable_grad():
                self._function(*tensors)
        except _Filled:
            pass
        except BaseException:
            self._forget()
            raise
        try:
            again.check()
        except ReplayMismatch:
            self._forget()
            raise

    def _unpacked_inputs(self) -> Sequence[Tensor]:
        try:
            return self._inputs.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            which = "a tensor among the arguments"
            for index, (ref, version) in enumerate(self._versions):
                x = ref()
                if x is not None and x._version != version:
                    which = f"tensor {index} of the arguments ({_Look.of(x)})"
                    break
            raise ReplayMismatch(
                f"{which} was changed in place, by the region itself or after it", "give the region a copy, or change a copy of it."
            ) from error

    def _forget(self) -> None:
        for ref in self._holders:
            if (holder := ref()) is not None:
                holder.value = None


class _Again:
    """One replay of a region: what it has saved so far."""

    def __init__(self, region: Region, needed: int) -> None:
        self.region = region
        self.needed = needed
        self.position = 0
        self.checksums: list[Tensor] = []
        self.places: list[str] = []

    def refill(self, x: Tensor) -> Tensor:
        """Hand the tensor to its holder, if anybody still has that."""
        x = x.detach() if x.requires_grad else x  # a saved result would keep its own graph alive
        index, self.position = self.position, self.position + 1
        if index >= self.needed:
            return x
        look, expected = _Look.of(x), self.region._looks[index]
        if look != expected:
            raise ReplayMismatch(
                f"the saved tensor {index} was {expected} in the forward pass and is {look} in its replay{_place(self.region._modules)}",
                "the region must not depend on what changes between forward and backward: globals, caches, the clock, attributes.",
            )
        if self.region._checksums is not None:
            self.checksums.append(checksum(x))
            self.places.append(_place(self.region._modules))
        holder = self.region._holders[index]()
        if holder is not None:
            holder.value, holder.version = x, x._version
        if self.position == self.needed:
            raise _Filled
        return x

    def check(self) -> None:
        """Raise ReplayMismatch unless as much was saved as in the forward pass and, where asked for, the same values, which syncs."""
        if self.position < self.needed:
            raise ReplayMismatch(
                f"the forward pass saved {self.needed} tensors and its replay {self.position}; the first that is missing was "
                f"{self.region._looks[self.position]}",
                "the region must run the same operations again: look for caches, counters and conditions that changed in between.",
            )
        wanted = self.region._checksums
        if wanted is None:
            return
        first = _first_difference(wanted[: self.needed], self.checksums)
        if first is not None:
            raise ReplayMismatch(
                f"the saved tensor {first} ({self.region._looks[first]}) has other values in the replay{self.places[first]}",
                "name every generator that the region draws from (generators=, python=, numpy=), and change no tensor between forward and "
                "backward, by .data least of all.",
            )


def _first_difference(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> int | None:
    """The first index at which two lists of numbers differ; one sync for each device."""
    differ = []
    for device in {number.device for number in wanted}:
        indices = [index for index, number in enumerate(wanted) if number.device == device]
        unequal = torch.stack([wanted[i] for i in indices]) != torch.stack([found[i] for i in indices])
        differ += [index for index, flag in zip(indices, unequal.tolist(), strict=True) if flag]
    return min(differ, default=None)


def _same(x: Tensor) -> Tensor:
    return x


def _place(roots: Sequence[torch.nn.Module]) -> str:
    """Where the running code is: the innermost module's name and the line, as ", in module 'mlp.act' (GELU), line 12 of file.py"."""
    frame: FrameType | None = sys._getframe(1)
    line, module = "", ""
    while frame is not None and not module:
        name = frame.f_code.co_filename
        if not line and not name.startswith(_TORCH) and name != __file__:
            line = f", line {frame.f_lineno} of {name}"
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, torch.nn.Module):
            path = next((path for root in roots for path, child in root.named_modules() if child is candidate), None)
            named = f" {path!r}" if path else ""
            module = f", in module{named} ({type(candidate).__name__})"
        frame = frame.f_back
    return module + line
