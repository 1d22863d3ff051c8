"""One call of a block: everything static about it, the tensors that all blocks share, and what its two halves share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import Backend, NormSpec
from .masks import AttentionMask, full_mask
from .scoring import Scoring
from .sites import BlockDropout, block_dropout
from .slicing import Slicing
from .spec import BlockSpec, Save
from .tensor_parallel import TensorParallel
from .weights import BlockWeights, Layout, NormWeights


def flat(x: Tensor) -> Tensor:
    """`[B, T, C]` as rows `[B * T, C]`."""
    return x.reshape(-1, x.size(-1))


class Shared(NamedTuple):
    """Inputs of a call that get no gradient: one object for all blocks of a model, but for the RNG state."""

    cos: Tensor | None
    sin: Tensor | None
    state: Tensor | None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    dense: Tensor | None = None

    @property
    def table(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the rotary embedding."""
        return None if self.cos is None or self.sin is None else (self.cos, self.sin)

    @property
    def mask(self) -> AttentionMask:
        """What of the mask is data."""
        return AttentionMask(self.query_segments, self.key_segments, self.dense)


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
    offload: bool = False
    """Whether x waits in the host's memory."""
    across: TensorParallel | None = None
    """The ranks that the block is cut across, of which `spec` is this one's share."""

    @property
    def norm(self) -> NormSpec:
        """Every norm of the block."""
        return NormSpec(self.spec.norm, self.spec.norm_eps, self.spec.norm_offset)

    def dropout(self, shared: Shared) -> BlockDropout:
        """The dropout of each site of the block."""
        dropout = block_dropout(self.spec, shared.state)
        return dropout if self.across is None else dropout._replace(mlp=self.across.of_share(dropout.mlp))

    def total(self, part: Tensor) -> Tensor:
        """Rows, new, that the ranks have parts of, added up over them."""
        return part if self.across is None else self.across.total(part)

    def scoring(self, weights: BlockWeights, x: Tensor, shared: Shared) -> Scoring:
        """How this call's attention scores become weights."""
        spec = self.spec
        batch, length, _ = x.shape
        heads = spec.heads * (1 if self.across is None else self.across.size)
        mask = full_mask(shared.mask, causal=spec.causal, window=spec.window, shape=(batch, heads, length, length), device=x.device)
        sinks = None if weights.sinks is None else weights.sinks.logits
        scoring = Scoring(mask, spec.scale, spec.softcap, sinks, self.dropout(shared).attention)
        return scoring if self.across is None else scoring.of_heads(self.across.heads(spec), heads, length)

    def through_norm(
        self, grad: Tensor | None, x: Tensor, weights: NormWeights, stats: Tensor, needs: Sequence[bool], *, onto: Tensor | None
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Gradient of rows x of the stream, given that of their norm, plus `onto`, that of its residual path; and of the norm's tensors.

        Nothing is computed where `grad` is None; no gradient of x is returned where `onto` is None.
        """
        if grad is None:
            return None, (None, None)
        grad_x, *grad_params = self.backend.norm_backward(grad, x, *weights, stats, self.norm, params=any(needs), onto=onto)
        needed = [g if need else None for g, need in zip(grad_params, needs, strict=True)]
        return (None if onto is None else grad_x), needed

