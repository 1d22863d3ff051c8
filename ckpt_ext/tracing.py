"""The bytes that one part of a chain takes, a block or a head, without the rest of the chain: on fake, meta or real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from .memory import LiveStorages


class Bytes(NamedTuple):
    """What a part of a chain takes: the bytes of a `costs.Cost`."""

    saved: int
    forward: int
    backward: int


def trace(run: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: str, ignored: Iterable[Tensor]) -> Bytes:
    """The bytes of `y = run(x)` as one part of a chain: nobody but autograd holds x, y or their gradients, and each of them counts."""
    memory = LiveStorages(ignored)
    seed = torch.zeros((), device=device, requires_grad=True)
    with memory:
        x = _Source.apply(seed, shape, dtype)
        y = run(x)
        del x
        forward = memory.peak
        end = _Sink.apply(y) if y.dim() else y
        del y
        saved = memory.live - end.nbytes
        memory.peak = memory.live
        end.backward()
        backward = memory.peak
    return Bytes(saved, forward, backward)


class _Source(torch.autograd.Function):
    """A tensor out of nothing, as the block before would have made it."""

    @staticmethod
    def forward(ctx, seed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=seed.device)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None, None


class _Sink(torch.autograd.Function):
    """Takes a tensor and keeps nothing; backward hands over a gradient in full, as the block behind would."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.like = y.shape, y.dtype, y.device
        return torch.zeros((), device=y.device)

    @staticmethod
    def backward(ctx, grad: Tensor):
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)


def fake_tensors() -> AbstractContextManager:
    """A mode under which tensors have no data; of whatever device, the CPU's operators run."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # the compiler comes with it

    return FakeTensorMode()
