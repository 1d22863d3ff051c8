"""Attention in ATen operators, by chunks: PyTorch's fused CPU kernel where it fits (aten_fused), else plain products (aten_blocked).

Backward of softmax attention, per head, with C = cap(q k^T * scale), P = exp(mask(C) - lse), P~ = drop(P), out = P~ v and
delta = rowsum(grad * out):

    dv = P~^T grad      dP~ = grad v^T      dS = P * (drop(dP~) - delta) * cap'      dq = dS k * scale      dk = dS^T q * scale

with cap' = 1 - (C / softcap)^2, or 1. Only q, k, v, out and lse come in; C and P are made again. A sink is one more key, without a value:
from out and lse without it follow

    lse' = log(exp(lse) + exp(sink))      out' = out * exp(lse - lse')      dsink = -sum over rows of exp(sink - lse') * delta

and the formulas above hold with out' and lse'. Of a row that sees no key out is 0 and lse -inf; for its gradients lse is taken to be +inf,
so that P, and all that follows from it, is 0.

A hidden key has weight 0, so finite numbers in padding never matter, but those whose scores overflow; NaN and infinity in padding do, as
0 * NaN is NaN: `scaled_dot_product_attention` does the same. What causality or the window hides from all rows of a chunk is not read.
"""

import torch
from torch import Tensor

from ..scoring import Scoring
from ..validate import widened
from . import aten_blocked, aten_fused
from .aten_chunks import Chunk, chunks, mask_shape

_CHUNK_ELEMENTS = 1 << 20
"""Attention weights alive at a time in plain products, unless a single row of a key head's queries has more, and elements of a mask alive
at a time beside the fused kernel: 4 MiB in float32. Smaller is slower in plain products, since a chunk then has few rows."""


def attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    fused, plan = _plan(q, k, scoring)
    if fused and _at_once(plan):
        out, lse = aten_fused.forward(q, k, v, plan[0], scoring)
    else:
        run = aten_fused.forward if fused else aten_blocked.forward
        out, lse = _by_length(q, q.dtype).zero_(), q.new_full(q.shape[:3], -torch.inf, dtype=widened(q.dtype))
        for chunk in plan:
            if not chunk.sees_no_key:
                out[chunk.queries], lse[chunk.queries] = run(q[chunk.queries], k[chunk.keys], v[chunk.keys], chunk, scoring)
    if scoring.sinks is not None:
        total = torch.logaddexp(lse, scoring.sinks.to(lse.dtype)[:, None])
        out.mul_(lse.sub_(_guarded(total)).exp_().unsqueeze(-1))
        lse = total
    return out, lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    fused, plan = _plan(q, k, scoring)
    lse = _guarded(lse)
    delta = None if fused and scoring.sinks is None else _delta(grad, out)
    grad_sinks = None
    if scoring.sinks is not None and delta is not None:
        grad_sinks = ((scoring.sinks.to(lse.dtype)[:, None] - lse).exp_() * delta).sum((0, 2)).neg_()
    if fused and _at_once(plan):
        return *aten_fused.backward(grad, q, k, v, out, lse, plan[0], scoring), grad_sinks
    wide = widened(q.dtype)
    grad_q, grad_k, grad_v = (_by_length(t, dtype).zero_() for t, dtype in ((q, q.dtype), (k, wide), (v, wide)))
    for chunk in plan:
        if chunk.sees_no_key:
            continue
        tensors = grad[chunk.queries], q[chunk.queries], k[chunk.keys], v[chunk.keys]
        if fused:
            parts = aten_fused.backward(*tensors, out[chunk.queries], lse[chunk.queries], chunk, scoring)
        else:
            assert delta is not None
            parts = aten_blocked.backward(*tensors, delta[chunk.queries], lse[chunk.queries], chunk, scoring)
        grad_q[chunk.queries] = parts[0]
        grad_k[chunk.keys] += parts[1]
        grad_v[chunk.keys] += parts[2]
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks


def _plan(q: Tensor, k: Tensor, scoring: Scoring) -> tuple[bool, list[Chunk]]:
    """Whether the fused kernel computes it, and the chunks: there they bound the memory of the mask, else that of the scores."""
    fused = aten_fused.fits(q, scoring)
    query_count, key_count = q.size(2), k.size(2)
    held = mask_shape(scoring.mask, query_count, key_count) if fused else torch.Size((*q.shape[:3], key_count))
    return fused, list(chunks(q, k, scoring.mask, held, _CHUNK_ELEMENTS))


def _at_once(plan: list[Chunk]) -> bool:
    """Whether one chunk holds all queries and keys."""
    return len(plan) == 1 and plan[0].keys[2] == slice(0, plan[0].whole[3]) and not plan[0].sees_no_key


def _guarded(lse: Tensor) -> Tensor:
    """lse with +inf for -inf, so that exp(x - lse) is 0 for all x of a row without keys."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _delta(grad: Tensor, out: Tensor) -> Tensor:
    """`rowsum(grad * out)`, `[B, H, Tq]`, wide; a head at a time, for the products of all elements are as large as out."""
    wide = widened(out.dtype)
    delta = out.new_empty(out.shape[:3], dtype=wide)
    for head in range(out.size(1)):
        delta[:, head] = torch.linalg.vecdot(grad[:, head].to(wide), out[:, head].to(wide))
    return delta


def _by_length(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of x's shape `[B, H, T, D]` that lies in memory as `[B, T, H, D]`."""
    batch, heads, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim, dtype=dtype).transpose(1, 2)
