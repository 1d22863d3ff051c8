"""Attention in ATen operators: PyTorch's fused CPU kernel where it fits, else a blocked path that holds a few query rows' weights.

Backward of softmax attention, per head, with S = q k^T * scale, P = exp(S - lse), P~ = drop(P), out = P~ v and delta = rowsum(grad * out):

    dv = P~^T grad      dP~ = grad v^T      dS = P * (drop(dP~) - delta)      dq = dS k * scale      dk = dS^T q * scale

Only q, k, v, out and lse come in; S and P are made again, a chunk of query rows at a time.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..rng import Dropout
from ..scoring import Scoring

_CHUNK_ELEMENTS = 1 << 20
"""Attention weights alive at a time in the blocked path, unless a single row of all heads has more: 4 MiB in float32."""


def attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    causal, scale, dropout = scoring.mask.causal, scoring.scale, scoring.dropout
    if _fused_fits(q, k, scale, dropout):
        q, k, v = map(_dense_heads, (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return _blocked(q, k, v, causal, scale, dropout)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    causal, scale, dropout = scoring.mask.causal, scoring.scale, scoring.dropout
    if _fused_fits(q, k, scale, dropout):
        grad, q, k, v, out = map(_dense_heads, (grad, q, k, v, out))
        return *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        ), None
    return *_blocked_backward(grad, q, k, v, out, lse, causal, scale, dropout), None


def _fused_fits(q: Tensor, k: Tensor, scale: float, dropout: Dropout | None) -> bool:
    # The kernel masks by -inf before it scales, so it is right for positive scales only.
    return q.device.type == "cpu" and dropout is None and scale > 0 and q.numel() > 0 and k.numel() > 0


def _dense_heads(x: Tensor) -> Tensor:
    """x with each head's elements side by side, which the fused kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Chunk(NamedTuple):
    """Query rows `rows` of all heads, against the first `keys` keys."""

    rows: slice
    keys: int

    def queries(self, x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
        """Rows of `x [B, H, Tq, ...]` as `[B * KV, H / KV * rows, ...]`: the queries that share a key head lie together."""
        return x[:, :, self.rows].to(dtype).unflatten(1, (kv_heads, -1)).flatten(0, 1).flatten(1, 2)

    def drop(self, weights: Tensor, dropout: Dropout, shape: torch.Size, cols: int) -> Tensor:
        """Dropout of `weights [B * KV, H / KV * rows, keys]`, with the mask that the whole `[B, H, Tq, cols]` would get."""
        batch, heads, length = shape[:3]
        rows = weights.view(batch, heads, self.rows.stop - self.rows.start, self.keys)
        dropped = torch.ops.ckpt_ext.dropout(
            rows, dropout.state, dropout.p, int(dropout.site), cols=cols,
            row_start=dropout.row_start + self.rows.start, row_strides=[dropout.batch_rows or heads * length, length, 1],
        )
        return dropped.view_as(weights)


def _chunks(q: Tensor, k: Tensor, causal: bool) -> Iterator[_Chunk]:
    batch, heads, length, _ = q.shape
    cols = k.size(2)
    size = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * cols))
    for start in range(0, length, size):
        stop = min(start + size, length)
        yield _Chunk(slice(start, stop), min(stop, cols) if causal else cols)


def _scores(chunk: _Chunk, q_rows: Tensor, k_wide: Tensor, causal: bool, scale: float) -> Tensor:
    """Scaled and masked scores `[B * KV, H / KV * rows, keys]`."""
    scores = (q_rows @ k_wide[:, : chunk.keys].transpose(1, 2)).mul_(scale)
    if causal:
        start, stop = chunk.rows.start, chunk.rows.stop
        hidden = torch.ones(stop - start, chunk.keys, dtype=torch.bool, device=scores.device).triu_(start + 1)
        scores.unflatten(1, (-1, stop - start)).masked_fill_(hidden, -torch.inf)
    return scores


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums, softmax and statistics are computed in: float32, or float64 for float64 tensors."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_length(x: Tensor) -> Tensor:
    """An empty tensor of x's shape `[B, H, T, D]` that lies in memory as `[B, T, H, D]`."""
    batch, heads, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


def _blocked(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
    wide, kv_heads = wide_dtype(q), k.size(1)
    k_wide, v_wide = (t.to(wide).flatten(0, 1) for t in (k, v))
    out = _by_length(q)
    lse = q.new_empty(q.shape[:3], dtype=wide)
    for chunk in _chunks(q, k, causal):
        scores = _scores(chunk, chunk.queries(q, kv_heads, wide), k_wide, causal, scale)
        rows = lse[:, :, chunk.rows]
        rows.copy_(scores.logsumexp(-1).view(rows.shape))
        weights = scores.softmax(-1)
        if dropout is not None:
            weights = chunk.drop(weights, dropout, q.shape, k.size(2))
        part = out[:, :, chunk.rows]
        part.copy_((weights @ v_wide[:, : chunk.keys]).view(part.shape))
    return out, lse


def _blocked_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, dropout: Dropout | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide, kv_heads = wide_dtype(q), k.size(1)
    k_wide, v_wide = (t.to(wide).flatten(0, 1) for t in (k, v))
    grad_q = _by_length(q)
    grad_k, grad_v = torch.zeros_like(k_wide), torch.zeros_like(v_wide)
    for chunk in _chunks(q, k, causal):
        q_rows, grad_rows, out_rows, lse_rows = (chunk.queries(t, kv_heads, wide) for t in (q, grad, out, lse))
        keys = slice(0, chunk.keys)
        delta = torch.linalg.vecdot(grad_rows, out_rows).unsqueeze(-1)
        weights = _scores(chunk, q_rows, k_wide, causal, scale).sub_(lse_rows.unsqueeze(-1)).exp_()
        grad_weights = grad_rows @ v_wide[:, keys].transpose(1, 2)
        dropped = weights
        if dropout is not None:
            dropped = chunk.drop(weights, dropout, q.shape, k.size(2))
            grad_weights = chunk.drop(grad_weights, dropout, q.shape, k.size(2))
        grad_v[:, keys] += dropped.transpose(1, 2) @ grad_rows
        grad_scores = grad_weights.sub_(delta).mul_(weights).mul_(scale)
        part = grad_q[:, :, chunk.rows]
        part.copy_((grad_scores @ k_wide[:, keys]).view(part.shape))
        grad_k[:, keys] += grad_scores.transpose(1, 2) @ q_rows
    by_length = (_by_length(k).copy_(grad_k.view(k.shape)), _by_length(v).copy_(grad_v.view(v.shape)))
    return grad_q, *by_length
