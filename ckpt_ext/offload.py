"""Inputs of blocks that wait for backward in the host's memory: copied there in the next block's forward pass, and back one block ahead.

An input stays on the device until the next block's comes: so the last one, which backward wants first, never leaves. Copies run on a
stream of their own, at most two in flight each way; the compute stream waits for one only when its memory is wanted. On a CPU the host's
memory is the device's: everything runs as on an accelerator, copies included, and nothing is gained. An input that is parked is no saved
tensor of autograd's, so `saved_tensors_hooks` do not see it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from . import host

LEAST_BYTES = 1 << 18
"""Smaller inputs stay: a copy of so few bytes takes less time than its launch."""


def park(x: Tensor) -> Parked | None:
    """x, to be had again for backward; None where it is too small to leave.

    Raises NotImplementedError while a CUDA graph is captured: which copies are still to be waited for is decided in Python.
    """
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError("offload must be False while a CUDA graph is captured, got True")
    if x.nbytes < LEAST_BYTES:
        return None
    lane: Lane = _Here() if not torch.accelerator.is_available() or _has_no_data(x) or x.is_cpu else _lane(x.device)
    previous = _latest(x.device)
    parked = Parked(x, lane, previous)
    _LATEST.inputs[x.device] = weakref.ref(parked)
    if previous is not None:
        previous.leave()
    return parked


def saved_by(node: Any) -> Sequence[Any]:
    """What a block's autograd node has saved, x first, fetched where it was `node.parked`."""
    if node.parked is None:
        return node.saved_tensors
    # First, since it raises where the graph has been freed.
    _, *rest = node.saved_tensors
    return node.parked.take(), *rest


class Lane(Protocol):
    """How copies are made; what `wait_for` takes is what the copies return."""

    def to_host(self, x: Tensor) -> tuple[Tensor, Any]: ...

    def to_device(self, buffer: Tensor, like: torch.device) -> tuple[Tensor, Any]: ...

    def wait_for(self, copy: Any) -> None: ...


class Parked:
    """The input of one block, on its way."""

    def __init__(self, x: Tensor, lane: Lane, previous: Parked | None) -> None:
        self._lane = lane
        self._previous = None if previous is None else weakref.ref(previous)
        self._device, self._version, self._changed = x.device, x._version, False
        self._x: Tensor | None = x.detach()
        self._buffer: Tensor | None = None
        self._copy: Any = None

    def leave(self) -> None:
        """Begin the copy to the host, and end the previous input's: its memory is free from here on."""
        if self._x is not None and self._buffer is None:
            self._note_change()
            self._buffer, self._copy = self._lane.to_host(self._x)
        previous = self._before()
        if previous is not None:
            previous.go()

    def go(self) -> None:
        """Give up the place on the device, once the copy is made."""
        if self._x is not None and self._buffer is not None:
            self._lane.wait_for(self._copy)
            self._note_change()
            self._x = self._copy = None

    def fetch(self) -> None:
        """Begin the copy back, unless x is still there."""
        if self._x is None and self._buffer is not None:
            self._x, self._copy = self._lane.to_device(self._buffer, self._device)
            self._version = self._x._version

    def take(self) -> Tensor:
        """x on its device; the input before it is fetched meanwhile.

        Raises RuntimeError where x was changed in place before its copy was made.
        """
        self.fetch()
        self._note_change()
        if self._changed:
            raise RuntimeError(
                "a block's offloaded input has been modified by an inplace operation before backward: its copy in the host's memory is not "
                "what the forward pass saw"
            )
        previous = self._before()
        if previous is not None:
            previous.fetch()
        x = self._x
        assert x is not None
        if self._copy is not None:
            self._lane.wait_for(self._copy)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._x = self._buffer = None
        elif self._buffer is not None:
            self._x = None
        self._copy = None
        return x

    def _before(self) -> Parked | None:
        return None if self._previous is None else self._previous()

    def _note_change(self) -> None:
        if self._x is not None and self._x._version != self._version:
            self._changed = True


class _Latest(threading.local):
    """The input that was parked last in this thread, by device."""

    def __init__(self) -> None:
        self.inputs: dict[torch.device, weakref.ref[Parked]] = {}


_LATEST = _Latest()


def _latest(device: torch.device) -> Parked | None:
    latest = _LATEST.inputs.get(device)
    return None if latest is None else latest()


def _has_no_data(x: Tensor) -> bool:
    return x.is_meta or type(x).__module__.startswith("torch._subclasses.")


class _Here:
    """Copies that are made when they are asked for."""

    def to_host(self, x: Tensor) -> tuple[Tensor, None]:
        return host.buffer_for(x).copy_(x), None

    def to_device(self, buffer: Tensor, like: torch.device) -> tuple[Tensor, None]:
        return torch.empty_like(buffer, device=like).copy_(buffer), None

    def wait_for(self, copy: None) -> None:
        """Nothing is under way."""


class _Streamed:
    """Copies on a stream of their own, beside that of the caller."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def to_host(self, x: Tensor) -> tuple[Tensor, torch.Event]:
        return self._copied(x, host.buffer_for(x))

    def to_device(self, buffer: Tensor, like: torch.device) -> tuple[Tensor, torch.Event]:
        # Made on the caller's stream, to which its memory belongs; the copy waits for what that has yet to do with it.
        return self._copied(buffer, torch.empty_like(buffer, device=like))

    def _copied(self, source: Tensor, target: Tensor) -> tuple[Tensor, torch.Event]:
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            target.copy_(source, non_blocking=True)
            return target, self._stream.record_event()

    def wait_for(self, copy: torch.Event) -> None:
        torch.accelerator.current_stream(self._stream.device).wait_event(copy)


@lru_cache(maxsize=64)
def _lane(device: torch.device) -> _Streamed:
    return _Streamed(device)
