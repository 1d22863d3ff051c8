"""The same block in plain, differentiable PyTorch: the specification that every kernel is tested against.

Nothing here is fast or frugal. All of it runs in float64, and draws the masks of `ckpt_ext.rng`, so that a run with dropout can be
compared element by element. Against `torch.nn.Dropout` only the distribution of masks can agree.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rng
from .masks import AttentionMask, Mask, full_mask
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
    """Rotary embedding of `x [B, H, T, D]`: the halves of the first R elements, R = 2 * cos.size(-1), turned against each other.

    Angles are `[T, R / 2]`, or `[B or 1, T, R / 2]`.
    """
    half = cos.size(-1)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), rest), -1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, dropout: Dropout | None = None,
) -> Tensor:  # fmt: skip
    """`drop(softmax(mask(cap(q k^T * scale)))) v` over `[B, H, T, D]`, every T x T weight in memory (`scoring.Scoring` has the terms)."""
    groups = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.size(-1) ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(mask, q.size(2), k.size(2), q.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : k.size(2)]
    # The softmax of a row without any key is 0 / 0.
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    if dropout is not None:
        weights = rng.dropout(weights, dropout)
    return weights @ v


def visible(mask: Mask, query_count: int, key_count: int, device: torch.device) -> Tensor:
    """What `mask` says, written out: bool, broadcastable to `[B, H, Tq, Tk]`."""
    queries, keys = torch.arange(query_count, device=device)[:, None], torch.arange(key_count, device=device)
    seen = torch.ones(1, 1, query_count, key_count, dtype=torch.bool, device=device)
    if mask.causal:
        seen = seen & (keys <= queries)
    if mask.window is not None:
        seen = seen & ((queries - keys).abs() < mask.window)
    if mask.query_segments is not None and mask.key_segments is not None:
        same = mask.query_segments[:, :, None] == mask.key_segments[:, None, :]
        seen = seen & (same & (mask.key_segments >= 0)[:, None, :])[:, None]
    return seen if mask.dense is None else seen & mask.dense


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
    x: Tensor, weights: BlockWeights, spec: BlockSpec, table: tuple[Tensor, Tensor] | None, state: Tensor | None, *,
    mask: AttentionMask | None = None, fused: bool = False,
) -> Tensor:  # fmt: skip
    """A block's output `[B, T, dim]`; `table` is `rope_table`'s, `state` the RNG state that its forward pass reserved, or None.

    With `fused`, attention goes through `scaled_dot_product_attention` where that can do it: what one writes by hand today.
    """
    if weights.across is not None:
        raise NotImplementedError("the eager block must be whole, got one that is cut across ranks")
    drop = block_dropout(spec, state)

    def normed(y: Tensor, parameters) -> Tensor:
        return norm(y, *parameters, kind=spec.norm, eps=spec.norm_eps, offset=spec.norm_offset)

    def heads(projection, rows: Tensor, parameters=None) -> Tensor:
        y = projection(rows)
        if parameters is not None and spec.qk_norm == "row":
            y = normed(y, parameters)
        y = y.unflatten(-1, (-1, spec.head_dim))
        if parameters is not None and spec.qk_norm == "head":
            y = normed(y, parameters)
        return y.transpose(1, 2)

    def residual(branch: Tensor, stream: Tensor, dropout: Dropout | None) -> Tensor:
        return stream + (branch if dropout is None else rng.dropout(branch, dropout))

    def same(y: Tensor) -> Tensor:
        return y

    def by(parameters) -> Callable[[Tensor], Tensor]:
        return lambda y: normed(y, parameters)

    # What stands before a branch, over it, and over its sum with the stream: of the attention half, then of the MLP half.
    first, second = by(weights.attention_norm), by(weights.mlp_norm)
    before, over, behind = {
        "pre": ((first, second), (same, same), (same, same)),
        "post": ((same, same), (same, same), (first, second)),
        "branch": ((same, same), (first, second), (same, same)),
        "sandwich": ((first, second), (by(weights.attention_out_norm), by(weights.mlp_out_norm)), (same, same)),
    }[spec.norm_placement]

    rows = before[0](x)
    q, k, v = heads(weights.q, rows, weights.q_norm), heads(weights.k, rows, weights.k_norm), heads(weights.v, rows)
    if table is not None:
        q, k = rotate(q, *table), rotate(k, *table)
    shape = (x.size(0), spec.heads, x.size(1), x.size(1))
    whole = full_mask(mask, causal=spec.causal, window=spec.window, shape=shape, device=x.device)
    if fused and drop.attention is None and weights.sinks is None and spec.softcap is None:
        positional = mask is None and spec.window is None
        seen = None if positional else visible(whole, x.size(1), x.size(1), x.device)
        out = F.scaled_dot_product_attention(
            q, k, v, seen, is_causal=positional and spec.causal, scale=spec.scale, enable_gqa=spec.heads != spec.kv_heads
        )
    else:
        sinks = None if weights.sinks is None else weights.sinks.logits
        out = attention(q, k, v, mask=whole, scale=spec.scale, softcap=spec.softcap, sinks=sinks, dropout=drop.attention)
    mid = behind[0](residual(over[0](weights.out(out.transpose(1, 2).flatten(2))), x, drop.attention_residual))

    rows = before[1](x if spec.parallel else mid)
    gate = None if weights.gate is None else weights.gate(rows)
    branch = weights.down(hidden(gate, weights.up(rows), spec.activation, drop.mlp))
    return behind[1](residual(over[1](branch), mid, drop.mlp_residual))
