"""A chunk of attention in plain matrix products, with all that `Scoring` has, on any device: two to four tensors of the chunk's scores."""

import torch
from torch import Tensor

from ..scoring import Scoring
from ..validate import widened
from .aten_chunks import Chunk


def forward(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the chunk `q [b, h, rows, D]`, `k` and `v [b, kv, keys, D]`, without sinks; -inf for lse of a row without keys."""
    q_rows, k_rows, v_rows = _stacked(q, k), _stacked(k, k), _stacked(v, k)
    weights = _scores(q_rows, k_rows, scoring)
    if scoring.softcap is not None:
        weights.tanh_().mul_(scoring.softcap)
    _hide(weights, q, chunk, scoring)
    largest = weights.amax(-1, keepdim=True)
    weights.sub_(largest.masked_fill(largest == -torch.inf, 0)).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _dropped(weights, q, chunk, scoring) @ v_rows
    out.div_(total.masked_fill(total == 0, 1))
    return out.view(q.shape), largest.add_(total.log_()).view(q.shape[:3])


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor, chunk: Chunk, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the chunk's q, k and v; `lse` is +inf for a row without keys, which makes its weights zeros."""
    q_rows, k_rows, v_rows, grad_rows = _stacked(q, k), _stacked(k, k), _stacked(v, k), _stacked(grad, k)
    scores = _scores(q_rows, k_rows, scoring)
    slope = None
    if scoring.softcap is not None:
        slope = scores.tanh_()
        scores = slope * scoring.softcap
        slope.square_().neg_().add_(1)
    _hide(scores, q, chunk, scoring)
    weights = scores.sub_(_stacked(lse.unsqueeze(-1), k)).exp_()
    grad_v = _dropped(weights, q, chunk, scoring).mT @ grad_rows
    grad_scores = _dropped(grad_rows @ v_rows.mT, q, chunk, scoring)
    grad_scores.sub_(_stacked(delta.unsqueeze(-1), k)).mul_(weights).mul_(scoring.scale)
    if slope is not None:
        grad_scores.mul_(slope)
    return (grad_scores @ k_rows).view(q.shape), (grad_scores.mT @ q_rows).view(k.shape), grad_v.view(v.shape)


def _stacked(x: Tensor, k: Tensor) -> Tensor:
    """`x [b, h, n, ...]` as `[b * kv, h / kv * n, ...]`, wide: the rows of the query heads that share a key head lie together."""
    return x.to(widened(x.dtype)).unflatten(1, (k.size(1), -1)).flatten(0, 1).flatten(1, 2)


def _scores(q_rows: Tensor, k_rows: Tensor, scoring: Scoring) -> Tensor:
    """Scaled, and where there is a softcap in units of it, before their tanh."""
    return (q_rows @ k_rows.mT).mul_(scoring.scale / (scoring.softcap or 1))


def _by_head(weights: Tensor, q: Tensor) -> Tensor:
    """`[b * kv, h / kv * rows, keys]` as `[b, h, rows, keys]`."""
    return weights.view(*q.shape[:3], weights.size(-1))


def _hide(scores: Tensor, q: Tensor, chunk: Chunk, scoring: Scoring) -> None:
    hidden = chunk.hidden(scoring.mask, q.device, causal=scoring.mask.causal)
    if hidden is not None:
        _by_head(scores, q).masked_fill_(hidden, -torch.inf)


def _dropped(weights: Tensor, q: Tensor, chunk: Chunk, scoring: Scoring) -> Tensor:
    if scoring.dropout is None:
        return weights
    return chunk.drop(_by_head(weights, q), scoring.dropout).view_as(weights)
