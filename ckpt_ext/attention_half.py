"""The attention half of a block, `mid = x + drop(out(attention(q, k, v of norm(x))))`, forward and backward on plain tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .call import BlockCall, flat
from .gradients import Gradients, in_dtype_of
from .projections import Projection
from .rng import Dropout
from .sites import BlockDropout
from .slicing import spans
from .weights import BlockWeights

INTERNALS = ("normed", "stats", "q", "k", "v", "out", "lse")
"""What lies between x and mid: the normed rows and their statistics, rotated q, k and v, the attention output and its log-sum-exp."""

PARTS = ("attention_norm", "q", "k", "v", "out")
"""The parameters of this half."""

Table = tuple[Tensor, Tensor] | None
"""Cosines and sines of the rotary embedding."""


def forward(
    call: BlockCall, weights: BlockWeights, x: Tensor, table: Table, dropout: BlockDropout, kept: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`mid`, contiguous, and the internals by name; the normed rows, which are cheap to make again, only for save="all".

    What `kept` has of them ("out" and "lse", if any) is taken from there, not computed.
    """
    normed, stats = _normed(call, weights, x)
    internals = {"normed": normed, "stats": stats} if call.save == "all" else {"stats": stats}
    q, k, v = _heads(call, weights.q(normed), x), _heads(call, weights.k(normed), x), _heads(call, weights.v(normed), x)
    del normed
    if table is not None:
        q = call.backend.rotate(q, *table)
        k = call.backend.rotate(k, *table)
    if "out" in kept:
        out, lse = kept["out"], kept["lse"]
    else:
        out, lse = call.backend.attention(q, k, v, causal=call.spec.causal, scale=call.scale, dropout=dropout.attention)
    branch = weights.out(_rows(out)).view(x.shape)
    mid = call.backend.dropout_add(branch, x, dropout.attention_residual).contiguous()
    return mid, internals | {"q": q, "k": k, "v": v, "out": out, "lse": lse}


def backward(
    call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], needs_x: bool, grad_mid: Tensor, x: Tensor,
    internals: dict[str, Tensor], table: Table, dropout: BlockDropout,
) -> tuple[Tensor | None, Gradients]:  # fmt: skip
    """Gradients of x (None unless `needs_x`) and of this half's parameters. Empties `internals` as it goes."""
    grads: Gradients = {}
    grad_branch = grad_mid
    if dropout.attention_residual is not None:
        grad_branch = call.backend.dropout(grad_mid, dropout.attention_residual)
    grad_branch = flat(grad_branch).to(call.dtype)
    grads["out"] = weights.out.grad_tensors(grad_branch, _rows(internals["out"]), needs["out"])
    if needs_x or any(any(needs[part]) for part in ("attention_norm", "q", "k", "v")):
        grad_out = _heads(call, weights.out.grad_input(grad_branch), x)
        del grad_branch
        head_grads = dict(zip("qkv", _through_attention(call, grad_out, internals, table, dropout.attention), strict=True))
        del grad_out
        stats = internals.pop("stats")
        normed = internals.pop("normed") if "normed" in internals else _normed(call, weights, x)[0]
        grad_normed = None
        for part in "qkv":
            projection: Projection = getattr(weights, part)
            grad = _rows(head_grads.pop(part))
            grads[part] = projection.grad_tensors(grad, normed, needs[part])
            if needs_x or any(needs["attention_norm"]):
                grad_normed = projection.grad_input(grad, into=grad_normed)
        del normed, grad
        onto = flat(grad_mid) if needs_x else None
        grad_rows, grads["attention_norm"] = call.through_norm(
            grad_normed, flat(x), weights.attention_norm, stats, needs["attention_norm"], onto=onto
        )
    else:
        grad_rows = None
    grads = {part: in_dtype_of(grads[part], getattr(weights, part)) for part in grads}
    return None if grad_rows is None else grad_rows.view(x.shape), grads


def _through_attention(
    call: BlockCall, grad_out: Tensor, internals: dict[str, Tensor], table: Table, dropout: Dropout | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v before their rotation, by groups of heads.

    They take the places of q, k and v, which are of no further use, but where those are saved tensors.
    """
    q, k, v, out, lse = (internals.pop(name) for name in ("q", "k", "v", "out", "lse"))
    results = [torch.empty_like(t) for t in (q, k, v)] if call.save == "all" else [q, k, v]
    for heads, kv_heads, group_dropout in _groups(call, q, dropout):
        grads = call.backend.attention_backward(
            grad_out[:, heads], q[:, heads], k[:, kv_heads], v[:, kv_heads], out[:, heads], lse[:, heads],
            causal=call.spec.causal, scale=call.scale, dropout=group_dropout,
        )  # fmt: skip
        for result, grad, place, turned in zip(results, grads, (heads, kv_heads, kv_heads), (True, True, False), strict=True):
            if turned and table is not None:
                grad = call.backend.rotate(grad, *table, inverse=True)
            result[:, place] = grad
    grad_q, grad_k, grad_v = results
    return grad_q, grad_k, grad_v


def _groups(call: BlockCall, q: Tensor, dropout: Dropout | None) -> Iterator[tuple[slice, slice, Dropout | None]]:
    """Query heads, their key heads, and the dropout of their rows of the mask."""
    spec, length = call.spec, q.size(2)
    for kv_heads in spans(spec.kv_heads, spec.kv_heads // call.slicing.head_groups):
        heads = slice(*(bound * (spec.heads // spec.kv_heads) for bound in (kv_heads.start, kv_heads.stop)))
        part = None if dropout is None else replace(dropout.rows_from(heads.start * length), batch_rows=spec.heads * length)
        yield heads, kv_heads, part


def _normed(call: BlockCall, weights: BlockWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    normed, stats = call.backend.norm(flat(x), *weights.attention_norm, call.norm)
    return normed.to(call.dtype), stats


def _heads(call: BlockCall, rows: Tensor, x: Tensor) -> Tensor:
    """`[N, heads * D]` as `[B, heads, T, D]`, without a copy."""
    batch, length, _ = x.shape
    head_dim = call.spec.head_dim
    return rows.view(batch, length, rows.size(-1) // head_dim, head_dim).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    """`[B, heads, T, D]`, lying as `[B, T, heads, D]`, as `[N, heads * D]`, without a copy."""
    return heads.transpose(1, 2).flatten(2).flatten(0, 1)
