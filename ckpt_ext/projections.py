"""The linear maps of a block, as an interface: what a block knows of a projection is how to run it and how to differentiate it.

A projection is given to an autograd Function in two parts, its tensors (explicit inputs of the Function, so that autograd versions and
differentiates them) and its kind (static), and is put together again inside by `kind.bind(tensors)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .tensor_parallel import Share

_STRETCH, _TILE = 1 << 23, 128
"""Elements of a product on their way to a sum of a wider dtype, and rows of a library's tile."""


class InCall(NamedTuple):
    """What a projection learns about the call of the block that it works in."""

    number: int
    """The projection's, in the order of `sites.PROJECTIONS`."""
    state: Tensor | None = None
    """The RNG state of the block's forward pass; None where it draws no mask."""
    autocast: torch.dtype | None = None
    """What autocast computes in where the block was called; None where it was off. Inside the block it is off."""


class Kind(Protocol):
    """The static part of a projection."""

    @property
    def arity(self) -> int:
        """How many tensors, or Nones in their place, the projection has."""
        ...

    @property
    def cuttable(self) -> bool:
        """Whether `rows` and `columns` may be asked for."""
        ...

    @property
    def reads_rows(self) -> bool:
        """Whether the gradient of the rows takes the rows themselves: of a map that is more than linear, or may be."""
        ...

    def rows(self, tensors: Sequence[Tensor | None], span: slice) -> list[Tensor | None]:
        """Views of `tensors`, or of tensors of the same shapes: those of the projection to the outputs in `span` alone."""
        ...

    def columns(self, tensors: Sequence[Tensor | None], span: slice) -> list[Tensor | None]:
        """The same of the projection from the inputs in `span`. Outputs of pieces add up to the whole's: a bias goes with input 0."""
        ...

    def bind(self, tensors: Sequence[Tensor | None]) -> Projection:
        """The projection of this kind over `tensors`."""
        ...


class Projection(Protocol):
    """A differentiable map of rows `[N, in]` to `[N, out]`, each for itself, computed in the dtype of the rows; linear, unless its kind
    reads rows."""

    @property
    def kind(self) -> Kind: ...

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that the map depends on and autograd may have to know: parameters, and an RNG state, which alone is not floating."""
        ...

    @property
    def drops(self) -> bool:
        """Whether it draws masks in training, hence needs RNG state."""
        ...

    def in_call(self, call: InCall) -> Projection:
        """The same map as one call of a block runs it. Raises ValueError where it is not well formed."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def rows_from(self, row: int) -> Projection:
        """The same map for rows of which the first is row `row` of all: where its result depends on that, as a dropout mask's does."""
        ...

    def grad_input(self, grad: Tensor, into: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        """Gradient of the rows, `[N, in]`, new; or added to `into`, in place, where that is given. `x`, the rows, must be given where
        `kind.reads_rows`."""
        ...

    def grad_tensors(
        self, grad: Tensor, x: Tensor, needs: Sequence[bool], onto: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        """Gradient of each of `tensors`, in the rows' dtype; None, and no work, where `needs` is false.

        Added in place to what an earlier slice of the rows has given, `onto`, in the dtype of that, where it is given.
        """
        ...

    def write_grads(self, grad: Tensor, x: Tensor, places: Sequence[Tensor | None]) -> None:
        """Write the gradient of each of `tensors` to its place, in the dtype of that; no work where there is None."""
        ...


class Uncut:
    """What kinds of projections have in common that are asked for neither `rows` nor `columns`."""

    cuttable = False

    def rows(self, tensors: Sequence[Tensor | None], span: slice) -> list[Tensor | None]:
        raise TypeError(f"{type(self).__name__} is a kind of projection that cannot be cut")

    columns = rows


@dataclass(frozen=True)
class _DenseKind:
    share: Share | None = None
    arity = 2
    cuttable = True
    reads_rows = False

    def rows(self, tensors: Sequence[Tensor | None], span: slice) -> list[Tensor | None]:
        return [None if t is None else t[span] for t in tensors]

    def columns(self, tensors: Sequence[Tensor | None], span: slice) -> list[Tensor | None]:
        weight, bias = tensors
        return [None if weight is None else weight[:, span], None if span.start else bias]

    def bind(self, tensors: Sequence[Tensor | None]) -> Dense:
        weight, bias = tensors
        assert weight is not None
        return Dense(weight, bias, self.share)


class _DenseByHeadKind(Uncut):
    arity = 2
    reads_rows = False

    def bind(self, tensors: Sequence[Tensor | None]) -> Dense:
        return _DENSE.bind(tensors)


class Dense(NamedTuple):
    """`x @ weight.T + bias` with `weight [out, in]` and `bias [out]` or None; cast to the rows' dtype where theirs differs.

    Of any strides. Also `weight [heads, D, in]` with `bias [heads, D]`, whose outputs are those of one head after another: so a part of a
    fused parameter with heads interleaved can be a view of that. Or this rank's `share` of a projection that is cut across ranks.
    """

    weight: Tensor
    bias: Tensor | None = None
    share: Share | None = None

    @property
    def kind(self) -> Kind:
        if self.share is not None:
            return _DenseKind(self.share)
        return _DENSE if self.weight.dim() == 2 else _DENSE_BY_HEAD

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias

    def __call__(self, x: Tensor) -> Tensor:
        bias = self.bias if self.share is None or self.share.adds_bias else None
        bias = None if bias is None else bias.flatten().to(x.dtype)
        return torch.nn.functional.linear(x, _matrix(self.weight).to(x.dtype), bias)

    @property
    def drops(self) -> bool:
        return False

    def in_call(self, call: InCall) -> Dense:
        return self

    def rows_from(self, row: int) -> Dense:
        return self

    def grad_input(self, grad: Tensor, into: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        return product(grad, _matrix(self.weight).to(grad.dtype), into)

    def grad_tensors(
        self, grad: Tensor, x: Tensor, needs: Sequence[bool], onto: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        needs_weight, needs_bias = needs
        weight_onto, bias_onto = onto or (None, None)
        grad_weight, grad_bias = None, None
        if needs_weight:
            grad_weight = product(grad.T, x, None if weight_onto is None else _matrix(weight_onto)).view(self.weight.shape)
        if needs_bias and self.bias is not None:
            grad_bias = grad.sum(0).view(self.bias.shape)
            grad_bias = grad_bias if bias_onto is None else bias_onto.add_(grad_bias)
        return [grad_weight, grad_bias]

    def write_grads(self, grad: Tensor, x: Tensor, places: Sequence[Tensor | None]) -> None:
        weight, bias = places
        if weight is not None and weight.dtype == grad.dtype:
            torch.mm(grad.T, x, out=_matrix(weight))
        elif weight is not None:
            _matrix(weight).copy_(grad.T @ x)
        if bias is not None:
            bias.copy_(grad.sum(0).view(bias.shape))


def write_by_copy(projection: Projection, grad: Tensor, x: Tensor, places: Sequence[Tensor | None]) -> None:
    """`Projection.write_grads` by way of `grad_tensors`."""
    grads = projection.grad_tensors(grad, x, [place is not None for place in places])
    for place, grad_tensor in zip(places, grads, strict=True):
        if place is not None and grad_tensor is not None:
            place.copy_(grad_tensor)


def product(a: Tensor, b: Tensor, onto: Tensor | None) -> Tensor:
    """`a @ b`, added to `onto` in place where that is given; to one of a wider dtype a stretch of rows at a time."""
    if onto is None:
        return a @ b
    if onto.dtype == a.dtype:
        return torch.addmm(onto, a, b, out=onto)
    for rows in stretches(*onto.shape):
        onto[rows].add_(a[rows] @ b)
    return onto


def stretches(rows: int, columns: int) -> Iterator[slice]:
    """Rows of a matrix in stretches of so few elements that a copy of one is small beside a weight, in whole tiles of a product."""
    size = max(1, _STRETCH // max(1, columns) // _TILE) * _TILE
    yield from (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _matrix(weight: Tensor) -> Tensor:
    """`[heads, D, in]` as `[heads * D, in]`, a copy where strides ask for one; a matrix as it is."""
    return weight.flatten(0, -2)


_DENSE, _DENSE_BY_HEAD = _DenseKind(), _DenseByHeadKind()
