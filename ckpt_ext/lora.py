"""A projection with low-rank adapters beside it (LoRA, arXiv:2106.09685), each with a dropout of its own.

With x the rows, s the scaling, and drop a dropout whose mask is replayed (its transpose is itself):

    y  = base(x) + sum over adapters of s (drop(x) A^T B^T + bias)
    u  = s (g B)                                  for g the gradient of y: `[N, r]`, so made twice rather than kept
    dx = base's + sum of drop(u A)                the mask applies here, too
    dA = u^T drop(x)      dB = s g^T (drop(x) A^T)      dbias = s sum(g)

The base is frozen, as a rule, and then costs no weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import rng
from .projections import InCall, Kind, Projection, Uncut, write_by_copy
from .rng import Dropout
from .sites import MOST_ADAPTERS, adapter_site
from .validate import number, probability

_TENSORS = 3
"""Of an adapter."""


class Adapter(NamedTuple):
    """`scaling * (drop(x) a^T b^T + b_bias)` with `a [r, in]`, `b [out, r]` and `b_bias [out]` or None; `p` is the dropout's."""

    a: Tensor
    b: Tensor
    b_bias: Tensor | None = None
    scaling: float = 1.0
    p: float = 0.0


class LoRA(NamedTuple):
    """`base(x) + sum of the adapters`, in the dtype of the rows.

    Adapters compute in the widest of their A's dtypes and the rows', and the sum is taken in that; under autocast in autocast's dtype.
    `state` is the RNG state of the masks, None where nothing is dropped. A block sets it, and what stands below it, for each call.
    """

    base: Projection
    adapters: tuple[Adapter, ...]
    state: Tensor | None = None
    projection: int = 0
    """The number of this projection in its block, which tells the masks of one from those of another."""
    dtype: torch.dtype | None = None
    """What the adapters compute in where autocast says so."""
    first_row: int = 0
    """Which row of all the first of those given is: a mask is a function of that."""

    @property
    def kind(self) -> Kind:
        options = tuple((adapter.scaling, adapter.p) for adapter in self.adapters)
        return _LoraKind(self.base.kind, options, self.projection, self.dtype, self.first_row)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self.base.tensors, *(t for adapter in self.adapters for t in (adapter.a, adapter.b, adapter.b_bias)), self.state

    @property
    def drops(self) -> bool:
        return self.base.drops or any(adapter.p > 0 for adapter in self.adapters)

    def in_call(self, call: InCall) -> LoRA:
        if len(self.adapters) > MOST_ADAPTERS:
            raise ValueError(f"adapters must be at most {MOST_ADAPTERS} a projection, got {len(self.adapters)}")
        for adapter in self.adapters:
            _check(adapter)
        # A view of its own: torch.compile takes no tensor twice among a Function's inputs.
        state = call.state.detach() if call.state is not None and self.drops else None
        return self._replace(base=self.base.in_call(call), state=state, projection=call.number, dtype=call.autocast, first_row=0)

    def rows_from(self, row: int) -> LoRA:
        return self._replace(base=self.base.rows_from(row), first_row=self.first_row + row)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        total = y.flatten(0, -2)
        for index, adapter in enumerate(self.adapters):
            a, b, bias = self._computed_in(x, adapter)
            dropped = self._dropped(index, x.to(a.dtype)).flatten(0, -2)
            total = torch.addmm(total.to(a.dtype), linear(dropped, a), b.T, alpha=adapter.scaling)
            if bias is not None:
                total = torch.add(total, bias, alpha=adapter.scaling)
        return total.to(x.dtype).view(y.shape)

    def grad_input(self, grad: Tensor, into: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        total = self.base.grad_input(grad, into, x)
        for index, adapter in enumerate(self.adapters):
            a, b, _ = self._computed_in(grad, adapter)
            rows = _through_b(grad.to(b.dtype), b, adapter) @ a
            total.add_(self._dropped(index, rows))
        return total

    def grad_tensors(
        self, grad: Tensor, x: Tensor, needs: Sequence[bool], onto: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        onto = onto or [None] * len(needs)
        of_base = self.base.kind.arity
        grads = self.base.grad_tensors(grad, x, needs[:of_base], onto[:of_base])
        for index in range(len(self.adapters)):
            place = slice(of_base + _TENSORS * index, of_base + _TENSORS * (index + 1))
            adapter_grads = self._grad_adapter(index, grad, x, needs[place])
            grads += [new if old is None or new is None else old.add_(new) for new, old in zip(adapter_grads, onto[place], strict=True)]
        return [*grads, None]

    def write_grads(self, grad: Tensor, x: Tensor, places: Sequence[Tensor | None]) -> None:
        write_by_copy(self, grad, x, places)

    def _grad_adapter(self, index: int, grad: Tensor, x: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of a, b and b_bias, in the dtype that the adapter computes in."""
        adapter = self.adapters[index]
        needs_a, needs_b, needs_bias = needs
        if not any(needs):
            return [None] * _TENSORS
        a, b, bias = self._computed_in(x, adapter)
        grad = grad.to(a.dtype)
        grad_a, grad_b = None, None
        if needs_a or needs_b:
            dropped = self._dropped(index, x.to(a.dtype))
            grad_a = _through_b(grad, b, adapter).T @ dropped if needs_a else None
            grad_b = grad.T @ (linear(dropped, a) * adapter.scaling) if needs_b else None
        return [grad_a, grad_b, grad.sum(0).mul_(adapter.scaling) if needs_bias and bias is not None else None]

    def _computed_in(self, rows: Tensor, adapter: Adapter) -> tuple[Tensor, Tensor, Tensor | None]:
        """The adapter's tensors in the dtype that it computes in on `rows`."""
        dtype = self.dtype or reduce(torch.promote_types, (other.a.dtype for other in self.adapters), rows.dtype)
        return adapter.a.to(dtype), adapter.b.to(dtype), None if adapter.b_bias is None else adapter.b_bias.to(dtype)

    def _dropped(self, index: int, rows: Tensor) -> Tensor:
        """Rows, of x or of the gradient that it gets, through an adapter's dropout."""
        p = self.adapters[index].p
        if self.state is None or p == 0:
            return rows
        return rng.dropout(rows, Dropout(self.state, p, adapter_site(self.projection, index), self.first_row))


@dataclass(frozen=True, slots=True)
class _LoraKind(Uncut):
    base: Kind
    options: tuple[tuple[float, float], ...]
    """Scaling and p of each adapter."""
    projection: int
    dtype: torch.dtype | None
    first_row: int

    @property
    def arity(self) -> int:
        return self.base.arity + _TENSORS * len(self.options) + 1

    @property
    def reads_rows(self) -> bool:
        return self.base.reads_rows

    def bind(self, tensors: Sequence[Tensor | None]) -> LoRA:
        *of_adapters, state = tensors[self.base.arity :]
        adapters = tuple(
            Adapter(*of_adapters[_TENSORS * index : _TENSORS * (index + 1)], scaling=scaling, p=p)  # type: ignore[arg-type, misc]
            for index, (scaling, p) in enumerate(self.options)
        )
        return LoRA(self.base.bind(tensors[: self.base.arity]), adapters, state, self.projection, self.dtype, self.first_row)


def _through_b(grad: Tensor, b: Tensor, adapter: Adapter) -> Tensor:
    """The gradient of what b is applied to, `[N, r]`, scaled."""
    return (grad @ b).mul_(adapter.scaling)


def _check(adapter: Adapter) -> None:
    a, b, bias, scaling, p = adapter
    number("an adapter's scaling", scaling)
    probability("an adapter's p", p)
    if a.dim() != 2 or b.dim() != 2 or a.size(0) != b.size(1):
        raise ValueError(f"an adapter must be of a [r, in] and b [out, r], got {list(a.shape)} and {list(b.shape)}")
    if bias is not None and bias.shape != b.shape[:1]:
        raise ValueError(f"an adapter's b_bias must have shape [{b.size(0)}], got {list(bias.shape)}")
