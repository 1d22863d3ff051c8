"""What a block takes that is written as people write it, the thing to compare with: nothing checkpointed, or `torch.utils.checkpoint`.

The block is Hugging Face's Llama layer with the parts that a `BlockSpec` may add; a test holds its bytes to those of transformers' own. Its
attention holds neither scores nor a mask, as that of the FlashAttention packages, whatever the spec's window, softcap and sinks; nothing is
dropped. Adapters are low-rank matrices beside every linear layer, computed in the block's dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import reference, rope
from .modules import TransformerBlock
from .spec import BlockSpec, pointwise
from .tracing import Bytes, trace
from .validate import one_of
from .weights import BlockWeights, NormWeights

Stock = Literal["plain", "torch checkpoint"]


@lru_cache(maxsize=4096)
def stock_bytes(
    spec: BlockSpec, batch: int, length: int, kind: Stock, dtype: torch.dtype = torch.bfloat16, *, trained: bool = True, rank: int = 0
) -> Bytes:  # fmt: skip
    """The bytes of the block on `[batch, length, spec.dim]`; with adapters of `rank` if there is any, which are trained in any case."""
    one_of("kind", kind, get_args(Stock))
    block = TransformerBlock(spec, dtype=dtype, device="meta").requires_grad_(trained)
    weights, adapters = _adapted(block.weights(), rank)
    table = [torch.cat((t, t), -1).to(dtype) for t in rope.table(spec, length, dtype, torch.device("meta")) if t is not None]

    def run(x: Tensor) -> Tensor:
        return _block(x, weights, spec, table)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a meta device has no random states
        ignored = [*block.parameters(), *adapters, *table]
        return trace(run if kind == "plain" else checkpointed, (batch, length, spec.dim), dtype, "meta", ignored)


class _Adapted(NamedTuple):
    """A projection with an adapter beside it, `base(x) + B A x` (arXiv:2106.09685)."""

    base: Callable[[Tensor], Tensor]
    a: Tensor
    b: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def _adapted(weights: BlockWeights, rank: int) -> tuple[BlockWeights, list[Tensor]]:
    """The weights, with adapters on the projections if there is a rank, and the adapters' tensors."""
    adapters: list[Tensor] = []
    for part in ("q", "k", "v", "out", "gate", "up", "down") if rank else ():
        base = getattr(weights, part)
        if base is not None:
            outputs, inputs = base.weight.shape
            pair = [nn.Parameter(base.weight.new_empty(size)) for size in ((rank, inputs), (outputs, rank))]
            adapters += pair
            weights = weights._replace(**{part: _Adapted(base, *pair)})  # type: ignore[arg-type]
    return weights, adapters


def _block(x: Tensor, weights: BlockWeights, spec: BlockSpec, table: list[Tensor]) -> Tensor:
    def heads(projection: Callable[[Tensor], Tensor], rows: Tensor, scales: NormWeights | None, *, turned: bool = True) -> Tensor:
        y = projection(rows)
        if scales is not None and spec.qk_norm == "row":
            y = norm(y, scales, spec)
        y = y.unflatten(-1, (-1, spec.head_dim))
        if scales is not None and spec.qk_norm == "head":
            y = norm(y, scales, spec)
        y = y.transpose(1, 2)
        return _turned(y, *table) if table and turned else y

    rows = norm(x, weights.attention_norm, spec)
    q, k = heads(weights.q, rows, weights.q_norm), heads(weights.k, rows, weights.k_norm)
    v = heads(weights.v, rows, None, turned=False)
    # By name, since the public function would choose for meta tensors what holds all scores. Its results are those of any such kernel.
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, spec.causal, scale=spec.scale)
    del rows, q, k, v
    mid = x + weights.out(out.transpose(1, 2).flatten(2))
    del out
    return mid + _mlp(norm(mid, weights.mlp_norm, spec), weights, spec)


def _mlp(rows: Tensor, weights: BlockWeights, spec: BlockSpec) -> Tensor:
    name = pointwise(spec.activation)
    if weights.gate is None:
        return weights.down(reference.activate(weights.up(rows), name))
    return weights.down(reference.activate(weights.gate(rows), name) * weights.up(rows))


def norm(x: Tensor, weights: NormWeights, spec: BlockSpec) -> Tensor:
    """Scaled after the way back from float32, as Llama's; Gemma's and LayerNorms as those are."""
    weight, bias = weights
    if spec.norm == "layer":
        return F.layer_norm(x, weight.shape, weight, bias, spec.norm_eps)
    if spec.norm_offset:
        return reference.norm(x, weight, eps=spec.norm_eps, offset=spec.norm_offset)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.norm_eps)).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.size(-1)
    part = x[..., :width]
    first, second = part.chunk(2, -1)
    turned = part * cos + torch.cat((-second, first), -1) * sin
    return turned if width == x.size(-1) else torch.cat((turned, x[..., width:]), -1)
