"""One call of a block: everything static about it, and what its two halves share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import Backend, NormSpec
from .slicing import Slicing
from .spec import BlockSpec, Save
from .weights import Layout, NormWeights


def flat(x: Tensor) -> Tensor:
    """`[B, T, C]` as rows `[B * T, C]`."""
    return x.reshape(-1, x.size(-1))


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The static arguments of one call; holds no tensor, so it may stay on an autograd context."""

    spec: BlockSpec
    save: Save
    backend: Backend
    layout: Layout
    dtype: torch.dtype
    """What the branches compute in. The residual stream, x to mid to y, keeps x's dtype."""
    slicing: Slicing

    @property
    def norm(self) -> NormSpec:
        """The norm of both halves."""
        return NormSpec(self.spec.norm, self.spec.norm_eps, self.spec.norm_offset)

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.spec.head_dim**-0.5

    def through_norm(
        self, grad: Tensor | None, x: Tensor, weights: NormWeights, stats: Tensor, needs: Sequence[bool], *, onto: Tensor | None
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Gradient of rows x of the stream, given that of their norm, plus `onto`, that of its residual path; and of the norm's tensors.

        Nothing is computed where `grad` is None; no gradient of x is returned where `onto` is None.
        """
        if grad is None:
            return None, (None, None)
        grad_x, *grad_params = self.backend.norm_backward(grad, x, *weights, stats, self.norm, params=any(needs))
        needed = [g if need else None for g, need in zip(grad_params, needs, strict=True)]
        return (None if onto is None else grad_x.add_(onto)), needed
