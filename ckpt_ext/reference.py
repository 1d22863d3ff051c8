"""The same block in plain, differentiable PyTorch: the specification that every kernel is tested against.

Nothing here is fast or frugal. All of it runs in float64, and draws the masks of `ckpt_ext.rng`, so that a run with dropout can be
compared element by element. Against `torch.nn.Dropout` only the distribution of masks can agree.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rng
from .rng import Dropout
from .sites import block_dropout
from .spec import BlockSpec, pointwise
from .weights import BlockWeights


def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kind: str = "rms", eps: float = 1e-5, offset: float = 0.0) -> Tensor:
    """RMSNorm (arXiv:1910.07467) or LayerNorm (arXiv:1607.06450) over the last axis, in float32 or wider, in x's dtype again."""
    wide = x if x.dtype == torch.float64 else x.float()
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.to(wide.dtype) + offset)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype)


def rope_table(length: int, dim: int, theta: float, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[length, dim / 2]` of `position * theta ** (-2 i / dim)` (arXiv:2104.09864, eq. 15)."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * theta**-exponent
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x [B, H, T, D]`: the halves of the first R elements, R = 2 * cos.size(-1), turned against each other."""
    half = cos.size(-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), rest), -1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, dropout: Dropout | None = None
) -> Tensor:
    """`drop(softmax(q k^T * scale)) v` over `[B, H, T, D]`, every T x T weight in memory; query i sees keys j <= i where causal."""
    groups = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.size(-1) ** -0.5 if scale is None else scale)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1)
    if dropout is not None:
        weights = rng.dropout(weights, dropout)
    return weights @ v


def activate(x: Tensor, name: str) -> Tensor:
    """One of `spec.PLAIN_ACTIVATIONS`, elementwise."""
    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
    raise ValueError(f"activation must be known, got {name!r}")


def hidden(gate: Tensor | None, up: Tensor, activation: str, dropout: Dropout | None = None) -> Tensor:
    """The hidden layer of a gated or plain MLP from its projections' outputs."""
    name = pointwise(activation)
    y = activate(up, name) if gate is None else activate(gate, name) * up
    return y if dropout is None else rng.dropout(y, dropout)


def block(
    x: Tensor, weights: BlockWeights, spec: BlockSpec, table: tuple[Tensor, Tensor] | None, state: Tensor | None, *, fused: bool = False
) -> Tensor:
    """A block's output `[B, T, dim]`; `table` is `rope_table`'s, `state` the RNG state that its forward pass reserved, or None.

    With `fused`, attention goes through `scaled_dot_product_attention` where it draws no mask: what one writes by hand today.
    """
    drop = block_dropout(spec, state)

    def normed(y: Tensor, parameters) -> Tensor:
        return norm(y, *parameters, kind=spec.norm, eps=spec.norm_eps, offset=spec.norm_offset)

    def heads(projection, rows: Tensor) -> Tensor:
        return projection(rows).unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)

    def residual(branch: Tensor, stream: Tensor, dropout: Dropout | None) -> Tensor:
        return stream + (branch if dropout is None else rng.dropout(branch, dropout))

    rows = normed(x, weights.attention_norm)
    q, k, v = (heads(projection, rows) for projection in (weights.q, weights.k, weights.v))
    if table is not None:
        q, k = rotate(q, *table), rotate(k, *table)
    if fused and drop.attention is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=spec.causal, enable_gqa=spec.heads != spec.kv_heads)
    else:
        out = attention(q, k, v, causal=spec.causal, dropout=drop.attention)
    mid = residual(weights.out(out.transpose(1, 2).flatten(2)), x, drop.attention_residual)

    rows = normed(mid, weights.mlp_norm)
    gate = None if weights.gate is None else weights.gate(rows)
    return residual(weights.down(hidden(gate, weights.up(rows), spec.activation, drop.mlp)), mid, drop.mlp_residual)
