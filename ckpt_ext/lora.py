"""A projection with low-rank adapters beside it (LoRA, arXiv:2106.09685), each with a dropout of its own.

With x the rows, s the scaling, and drop a dropout whose mask is replayed (its transpose is itself):

    y  = base(x) + sum over adapters of s (drop(x) A^T B^T + bias)
    u  = s (g B)                                  for g the gradient of y: `[N, r]`, so made twice rather than kept
    dx = base's + sum of drop(u A)                the mask applies here, too
    dA = u^T drop(x)      dB = s g^T (drop(x) A^T)      dbias = s sum(g)

The base is frozen, as a rule, and then costs no weight gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import rng
from .projections import InCall, Kind, Projection, Uncut, stretches, write_by_copy
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
        # In place, but where autograd looks on or somebody else may hold it: a hook of a module that is called.
        differentiable = torch.is_grad_enabled()
        y = y.clone(memory_format=torch.contiguous_format) if differentiable or self.base.kind.reads_rows else y
        rows, sums, dtype = x.flatten(0, -2), y.flatten(0, -2), self._dtype(x)
        for span in self._stretches(rows):
            part, total = rows[span].to(dtype), sums[span].to(dtype)
            for index, adapter in enumerate(self.adapters):
                a, b, bias = _in(dtype, adapter)
                through_a = linear(self._dropped(index, part, span), a)
                total = torch.addmm(total, through_a, b.T, alpha=adapter.scaling, out=None if differentiable else total)
                if bias is not None:
                    total.add_(bias, alpha=adapter.scaling)
            if differentiable or dtype != y.dtype:
                sums[span] = total
        return y

    def grad_input(self, grad: Tensor, into: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        total, dtype = self.base.grad_input(grad, into, x), self._dtype(grad)
        for span in self._stretches(grad):
            part, sums = grad[span].to(dtype), total[span]
            for index, adapter in enumerate(self.adapters):
                a, b, _ = _in(dtype, adapter)
                through_b = _through_b(part, b, adapter)
                if dtype == total.dtype and not self._drops(adapter):
                    torch.addmm(sums, through_b, a, out=sums)
                else:
                    sums.add_(self._dropped(index, through_b @ a, span))
        return total

    def grad_tensors(
        self, grad: Tensor, x: Tensor, needs: Sequence[bool], onto: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        onto = onto or [None] * len(needs)
        of_base = self.base.kind.arity
        grads = self.base.grad_tensors(grad, x, needs[:of_base], onto[:of_base])
        for index in range(len(self.adapters)):
            place = slice(of_base + _TENSORS * index, of_base + _TENSORS * (index + 1))
            sums = list(onto[place])
            if any(needs[place]):
                for span in self._stretches(grad):
                    sums = list(map(_sum, sums, self._grad_adapter(index, grad, x, needs[place], span)))
            grads += sums
        return [*grads, None]

    def write_grads(self, grad: Tensor, x: Tensor, places: Sequence[Tensor | None]) -> None:
        write_by_copy(self, grad, x, places)

    def _grad_adapter(self, index: int, grad: Tensor, x: Tensor, needs: Sequence[bool], span: slice) -> list[Tensor | None]:
        """What the rows in `span` give to the gradients of a, b and b_bias, in the dtype that adapters compute in."""
        adapter, dtype = self.adapters[index], self._dtype(x)
        needs_a, needs_b, needs_bias = needs
        a, b, bias = _in(dtype, adapter)
        grad = grad[span].to(dtype)
        grad_a, grad_b = None, None
        if needs_a or needs_b:
            dropped = self._dropped(index, x[span].to(dtype), span)
            grad_a = _through_b(grad, b, adapter).T @ dropped if needs_a else None
            grad_b = grad.T @ (linear(dropped, a) * adapter.scaling) if needs_b else None
        return [grad_a, grad_b, grad.sum(0).mul_(adapter.scaling) if needs_bias and bias is not None else None]

    def _dtype(self, rows: Tensor) -> torch.dtype:
        """What the adapters compute in on `rows`."""
        return self.dtype or reduce(torch.promote_types, (adapter.a.dtype for adapter in self.adapters), rows.dtype)

    def _stretches(self, rows: Tensor) -> Iterator[slice]:
        """Rows by so many at a time that copies of them, wider or with elements dropped, are small beside the whole."""
        widest = max([1, *(width for adapter in self.adapters for width in (adapter.a.size(1), adapter.b.size(0)))])
        return stretches(rows.size(0), widest)

    def _drops(self, adapter: Adapter) -> bool:
        return self.state is not None and adapter.p > 0

    def _dropped(self, index: int, rows: Tensor, span: slice) -> Tensor:
        """The rows in `span`, of x or of the gradient that it gets, through an adapter's dropout."""
        adapter = self.adapters[index]
        if self.state is None or not self._drops(adapter):
            return rows
        return rng.dropout(rows, Dropout(self.state, adapter.p, adapter_site(self.projection, index), self.first_row + span.start))


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


def _in(dtype: torch.dtype, adapter: Adapter) -> tuple[Tensor, Tensor, Tensor | None]:
    """The adapter's tensors in the dtype that it computes in."""
    return adapter.a.to(dtype), adapter.b.to(dtype), None if adapter.b_bias is None else adapter.b_bias.to(dtype)


def _sum(total: Tensor | None, addend: Tensor | None) -> Tensor | None:
    """What stretches give, added up in float32 or wider."""
    if total is None or addend is None:
        return total if addend is None else addend.to(torch.promote_types(addend.dtype, torch.float32))
    return total.add_(addend)


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
