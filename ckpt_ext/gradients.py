"""Gradients of a block's parameters on their way: collected by part, summed over slices of tokens or put together of slices of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .projections import Projection

Gradients = dict[str, Sequence[Tensor | None]]
"""Gradients of a block's parts by name (`weights.BlockWeights`), each in the order of the part's tensors."""


class Products(Protocol):
    """What takes the gradients of projections as they come."""

    def add_product(self, part: str, projection: Projection, grad: Tensor, x: Tensor, needs: Sequence[bool]) -> None:
        """Take the gradients of a projection of rows `x` for `grad` of its output."""
        ...


class Places(NamedTuple):
    """Where the gradients of the parts of an MLP go, each whole: nothing is summed. None where a gradient is not needed."""

    tensors: Mapping[str, Sequence[Tensor | None]]

    def add_product(self, part: str, projection: Projection, grad: Tensor, x: Tensor, needs: Sequence[bool]) -> None:
        projection.write_grads(grad, x, self.tensors[part])


class GradientSums:
    """Sums over `slices` slices, in float32 or wider between them; a lone slice's gradients stay as they come."""

    def __init__(self, slices: int) -> None:
        self._sliced = slices > 1
        self._sums: Gradients = {}

    def add_product(self, part: str, projection: Projection, grad: Tensor, x: Tensor, needs: Sequence[bool]) -> None:
        onto = self._sums.get(part)
        wide = torch.promote_types(grad.dtype, torch.float32)
        if onto is None and self._sliced and grad.dtype != wide:  # else a whole product would be alive beside its copy
            onto = [
                None if t is None or not need else torch.zeros_like(t, dtype=wide, memory_format=torch.contiguous_format)
                for t, need in zip(projection.tensors, needs, strict=True)
            ]
        self._sums[part] = projection.grad_tensors(grad, x, needs, onto)

    def add(self, part: str, grads: Sequence[Tensor | None]) -> None:
        """Add gradients that are at hand."""
        onto = self._sums.get(part)
        if onto is None:
            self._sums[part] = [
                g if g is None or not self._sliced else g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads
            ]
        else:
            for total, grad in zip(onto, grads, strict=True):
                if total is not None and grad is not None:
                    total.add_(grad)

    def finish(self, weights: object) -> Gradients:
        """Each sum in the dtype of its tensor in `weights`, whose attributes have the parts' names. Empties this."""
        return {part: in_dtype_of(self._sums.pop(part), getattr(weights, part)) for part in list(self._sums)}


def in_dtype_of(grads: Sequence[Tensor | None], part: Any) -> list[Tensor | None]:
    """Each gradient in the dtype of its tensor in `part`, a projection or the weights of a norm."""
    return [None if g is None else g.to(t.dtype) for g, t in zip(grads, part.tensors, strict=True)]
