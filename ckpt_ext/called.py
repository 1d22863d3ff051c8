"""A projection that is a module of its own: its forward is called, hooks and all, and differentiated by calling it again.

For what the engine cannot see through: quantised weights, parametrisations, hooks, weights that are gathered for the call. Nothing of the
module's own graph is kept: a gradient runs its forward again on the same rows, under `torch.enable_grad`, and asks `torch.autograd.grad`.
So its forward must give the same again: no random numbers, no running statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .projections import InCall, Kind, Uncut, write_by_copy
from .validate import is_floating


class Called(NamedTuple):
    """`module(x)`, of rows `[N, in]` to `[N, out]`, in the rows' dtype; made by `Called.of`.

    `parameters` are the module's that are floating: those get gradients. Those of integers (quantised) and buffers get none.
    """

    module: nn.Module
    parameters: tuple[Tensor, ...]
    autocast: torch.dtype | None = None
    """What autocast computes in around the module's forward; None where it is off."""

    @classmethod
    def of(cls, module: nn.Module, autocast: torch.dtype | None = None) -> Called:
        """The projection that calls `module`."""
        return cls(module, tuple(parameter for parameter in module.parameters() if is_floating(parameter)), autocast)

    @property
    def kind(self) -> Kind:
        return _CalledKind(self.module, len(self.parameters), self.autocast)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.parameters

    @property
    def drops(self) -> bool:
        return False

    def in_call(self, call: InCall) -> Called:
        return self._replace(autocast=call.autocast)

    def rows_from(self, row: int) -> Called:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        with nullcontext() if self.autocast is None else torch.autocast(x.device.type, self.autocast):
            return self.module(x).to(x.dtype)

    def grad_input(self, grad: Tensor, into: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        assert x is not None, "given where the kind reads rows"
        leaf = x.detach().requires_grad_()
        (grad_x,) = self._differentiate(leaf, [leaf], grad)
        if grad_x is None:
            return torch.zeros_like(x) if into is None else into
        if into is not None:
            return into.add_(grad_x)
        # What is returned may be written to; a module that hands rows on hands its gradient on, too.
        shares = grad_x.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
        return grad_x.clone(memory_format=torch.contiguous_format) if shares else grad_x

    def grad_tensors(
        self, grad: Tensor, x: Tensor, needs: Sequence[bool], onto: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        wanted = [parameter for parameter, need in zip(self.parameters, needs, strict=True) if need]
        if not wanted:
            return [None] * len(needs)
        found = iter(self._differentiate(x.detach(), wanted, grad))
        grads = [next(found) if need else None for need in needs]
        return [_sum(old, new) for old, new in zip(onto or [None] * len(needs), grads, strict=True)]

    def write_grads(self, grad: Tensor, x: Tensor, places: Sequence[Tensor | None]) -> None:
        write_by_copy(self, grad, x, places)

    def _differentiate(self, x: Tensor, wanted: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor | None]:
        """Gradients of `wanted` for that of the module's output; None where it does not depend on one."""
        with torch.enable_grad():
            y = self(x)
        if not y.requires_grad:
            return [None] * len(wanted)
        return torch.autograd.grad(y, wanted, grad.to(y.dtype), allow_unused=True)


@dataclass(frozen=True, slots=True)
class _CalledKind(Uncut):
    module: nn.Module
    """No tensor, though it has some; they outlive any context, for the model has them."""
    arity: int
    autocast: torch.dtype | None
    reads_rows = True

    def bind(self, tensors: Sequence[Tensor | None]) -> Called:
        # The module computes with its own parameters, which the tensors are.
        return Called.of(self.module, self.autocast)


def _sum(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old.add_(new)
