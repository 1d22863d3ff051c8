"""The attention half of a block, `mid = x + drop(out(attention(q, k, v of norm(x))))`, forward and backward on plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .call import BlockCall, Gradients, flat
from .projections import Projection
from .sites import BlockDropout
from .weights import BlockWeights

INTERNALS = ("normed", "stats", "q", "k", "v", "out", "lse")
"""What lies between x and mid: the normed rows and their statistics, rotated q, k and v, the attention output and its log-sum-exp."""

PARTS = ("attention_norm", "q", "k", "v", "out")
"""The parameters of this half."""


def forward(
    call: BlockCall, weights: BlockWeights, x: Tensor, table: tuple[Tensor, Tensor] | None, dropout: BlockDropout,
    kept: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """`mid`, and the internals by name. What `kept` has of them ("out" and "lse", if any) is taken from there, not computed."""
    normed, stats = call.backend.norm(x, *weights.attention_norm, call.norm)
    normed = flat(normed).to(call.dtype)
    q, k, v = (_heads(call, projection(normed), x) for projection in (weights.q, weights.k, weights.v))
    if table is not None:
        q, k = (call.backend.rotate(t, *table) for t in (q, k))
    if "out" in kept:
        out, lse = kept["out"], kept["lse"]
    else:
        out, lse = call.backend.attention(q, k, v, causal=call.spec.causal, scale=call.scale, dropout=dropout.attention)
    branch = weights.out(_rows(out)).view(x.shape)
    mid = call.backend.dropout_add(branch, x, dropout.attention_residual)
    return mid, {"normed": normed, "stats": stats, "q": q, "k": k, "v": v, "out": out, "lse": lse}


def backward(
    call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], needs_x: bool, grad_mid: Tensor, x: Tensor,
    internals: dict[str, Tensor], table: tuple[Tensor, Tensor] | None, dropout: BlockDropout,
) -> tuple[Tensor | None, Gradients]:
    """Gradients of x (None unless `needs_x`) and of this half's parameters. Empties `internals` as it goes."""
    grads: Gradients = {}
    grad_branch = grad_mid
    if dropout.attention_residual is not None:
        grad_branch = call.backend.dropout(grad_mid, dropout.attention_residual)
    grad_branch = flat(grad_branch).to(call.dtype)
    out = internals.pop("out")
    grads["out"] = weights.out.grad_tensors(grad_branch, _rows(out), needs["out"])
    if not (needs_x or any(any(needs[part]) for part in ("attention_norm", "q", "k", "v"))):
        return None, grads

    grad_out = _heads(call, weights.out.grad_input(grad_branch), x)
    del grad_branch
    q, k, v, lse = (internals.pop(name) for name in ("q", "k", "v", "lse"))
    grad_q, grad_k, grad_v = call.backend.attention_backward(
        grad_out, q, k, v, out, lse, causal=call.spec.causal, scale=call.scale, dropout=dropout.attention
    )
    del grad_out, q, k, v, out, lse
    if table is not None:
        grad_q, grad_k = (call.backend.rotate(t, *table, inverse=True) for t in (grad_q, grad_k))

    normed, stats = internals.pop("normed"), internals.pop("stats")
    head_grads = {"q": _rows(grad_q), "k": _rows(grad_k), "v": _rows(grad_v)}
    del grad_q, grad_k, grad_v
    grad_normed = None
    needs_normed = needs_x or any(needs["attention_norm"])
    for part in ("q", "k", "v"):
        projection: Projection = getattr(weights, part)
        grad = head_grads.pop(part)
        grads[part] = projection.grad_tensors(grad, normed, needs[part])
        if needs_normed:
            grad_normed = projection.grad_input(grad, into=grad_normed)
    del normed, grad
    grad_x, grads["attention_norm"] = call.through_norm(
        grad_normed, x, weights.attention_norm, stats, needs["attention_norm"], onto=grad_mid if needs_x else None
    )
    return grad_x, grads


def _heads(call: BlockCall, rows: Tensor, x: Tensor) -> Tensor:
    """`[N, heads * D]` as `[B, heads, T, D]`, without a copy."""
    batch, length, _ = x.shape
    head_dim = call.spec.head_dim
    return rows.view(batch, length, rows.size(-1) // head_dim, head_dim).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    """`[B, heads, T, D]`, lying as `[B, T, heads, D]`, as `[N, heads * D]`, without a copy."""
    return heads.transpose(1, 2).flatten(2).flatten(0, 1)
