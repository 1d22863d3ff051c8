"""Gradients of a block's parameters on their way: collected by part, and summed over slices of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .projections import Projection

Gradients = dict[str, Sequence[Tensor | None]]
"""Gradients of a block's parts by name (`weights.BlockWeights`), each in the order of the part's tensors."""


class GradientSums:
    """Sums over `slices` slices, in float32 or wider between them; a lone slice's gradients stay as they come."""

    def __init__(self, slices: int) -> None:
        self._sliced = slices > 1
        self._sums: Gradients = {}

    def add_product(self, part: str, projection: Projection, grad: Tensor, x: Tensor, needs: Sequence[bool]) -> None:
        """Add the gradients of a projection of rows `x` for `grad` of its output."""
        onto = self._sums.get(part)
        grads = projection.grad_tensors(grad, x, needs, onto)
        self._sums[part] = grads if onto is not None else self._widened(grads)

    def add(self, part: str, grads: Sequence[Tensor | None]) -> None:
        """Add gradients that are at hand."""
        onto = self._sums.get(part)
        if onto is None:
            self._sums[part] = self._widened(grads)
        else:
            for total, grad in zip(onto, grads, strict=True):
                if total is not None and grad is not None:
                    total.add_(grad)

    def finish(self, weights: object) -> Gradients:
        """Each sum in the dtype of its tensor in `weights`, whose attributes have the parts' names. Empties this."""
        return {part: in_dtype_of(self._sums.pop(part), getattr(weights, part)) for part in list(self._sums)}

    def _widened(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if not self._sliced:
            return grads
        return [None if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]


def in_dtype_of(grads: Sequence[Tensor | None], part: Any) -> list[Tensor | None]:
    """Each gradient in the dtype of its tensor in `part`, a projection or the weights of a norm."""
    return [None if g is None else g.to(t.dtype) for g, t in zip(grads, part.tensors, strict=True)]
