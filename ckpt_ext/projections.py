"""The linear maps of a block, as an interface: what a block knows of a projection is how to run it and how to differentiate it.

A projection is given to an autograd Function in two parts, its tensors (explicit inputs of the Function, so that autograd versions and
differentiates them) and its kind (static), and is put together again inside by `kind.bind(tensors)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Kind(Protocol):
    """The static part of a projection."""

    arity: int
    """How many tensors, or Nones in their place, the projection has."""

    def bind(self, tensors: Sequence[Tensor | None]) -> Projection:
        """The projection of this kind over `tensors`."""
        ...


class Projection(Protocol):
    """A differentiable linear map of rows `[N, in]` to `[N, out]`, computed in the dtype of the rows."""

    @property
    def kind(self) -> Kind: ...

    @property
    def tensors(self) -> tuple[Tensor | None, ...]: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def grad_input(self, grad: Tensor, into: Tensor | None = None) -> Tensor:
        """Gradient of the rows, `[N, in]`; added to `into`, in place, where that is given."""
        ...

    def grad_tensors(
        self, grad: Tensor, x: Tensor, needs: Sequence[bool], onto: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        """Gradient of each of `tensors`, in the rows' dtype; None, and no work, where `needs` is false.

        Added in place to what an earlier slice of the rows has given, `onto`, in the dtype of that, where it is given.
        """
        ...


class _DenseKind:
    arity = 2

    def bind(self, tensors: Sequence[Tensor | None]) -> Dense:
        weight, bias = tensors
        assert weight is not None
        return Dense(weight, bias)


class Dense(NamedTuple):
    """`x @ weight.T + bias` with `weight [out, in]` and `bias [out]` or None; cast to the rows' dtype where theirs differs."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def kind(self) -> Kind:
        return _DENSE

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), bias)

    def grad_input(self, grad: Tensor, into: Tensor | None = None) -> Tensor:
        weight = self.weight.to(grad.dtype)
        return product(grad, weight, into)

    def grad_tensors(
        self, grad: Tensor, x: Tensor, needs: Sequence[bool], onto: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        needs_weight, needs_bias = needs
        weight_onto, bias_onto = onto or (None, None)
        grad_weight = product(grad.T, x, weight_onto) if needs_weight else None
        grad_bias = None
        if needs_bias and self.bias is not None:
            grad_bias = grad.sum(0) if bias_onto is None else bias_onto.add_(grad.sum(0))
        return [grad_weight, grad_bias]


def product(a: Tensor, b: Tensor, onto: Tensor | None) -> Tensor:
    """`a @ b`, added to `onto` in place where that is given."""
    if onto is None:
        return a @ b
    if onto.dtype == a.dtype:
        return torch.addmm(onto, a, b, out=onto)
    return onto.add_(a @ b)


_DENSE = _DenseKind()
