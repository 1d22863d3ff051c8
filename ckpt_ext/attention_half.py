"""The attention half of a block: the branch `out(attention(q, k, v of norm(x)))`, forward and backward on plain tensors.

Which norm x has, if any, and how the branch joins the stream is `ckpt_ext.placement`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .call import BlockCall, Shared, flat
from .gradients import Gradients, in_dtype_of
from .placement import halves
from .projections import Projection
from .scoring import Scoring
from .slicing import spans
from .spec import BlockSpec
from .weights import BlockWeights, NormWeights

PARTS = ("attention_norm", "q", "k", "v", "q_norm", "k_norm", "sinks", "out", "attention_out_norm")
"""The parameters of this half."""

_INSIDE = ("q", "k", "v", "q_norm", "k_norm", "sinks")


def internals_of(spec: BlockSpec) -> tuple[str, ...]:
    """What lies between x and the branch: the normed rows and their statistics, where x has a norm; q, k and v as attention takes them, its
    output and log-sum-exp; where queries and keys have a norm, also what goes into that and the statistics of its rows."""
    entered = ("normed", "stats") if halves(spec).attention.entry else ()
    normed = ("raw_q", "raw_k", "q_stats", "k_stats") if spec.qk_norm else ()
    return (*entered, *normed, "q", "k", "v", "out", "lse")


def rebuild(
    call: BlockCall, weights: BlockWeights, x: Tensor, shared: Shared, kept: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The internals by name; the normed rows, cheap to make again, only for save="all".

    What `kept` has of them ("out" and "lse", if any) is taken from there, not computed.
    """
    normed, stats = halves(call.spec).attention.enter(call, weights, flat(x))
    internals: dict[str, Tensor] = {}
    if stats is not None:
        internals = {"normed": normed, "stats": stats} if call.save == "all" else {"stats": stats}
    rows = {"q": weights.q(normed), "k": weights.k(normed), "v": weights.v(normed)}
    del normed
    if call.spec.qk_norm:
        for name, norm in (("q", weights.q_norm), ("k", weights.k_norm)):
            assert norm is not None
            internals[f"raw_{name}"] = raw = rows[name]
            normed_rows, internals[f"{name}_stats"] = call.backend.norm(_norm_rows(call.spec, raw), *norm, call.norm)
            rows[name] = normed_rows.view(raw.shape)
    q, k, v = (_heads(call, rows.pop(name), x) for name in "qkv")
    if shared.table is not None:
        q = call.backend.rotate(q, *shared.table)
        k = call.backend.rotate(k, *shared.table)
    if "out" in kept:
        out, lse = kept["out"], kept["lse"]
    else:
        out, lse = call.backend.attention(q, k, v, call.scoring(weights, x, shared))
    return internals | {"q": q, "k": k, "v": v, "out": out, "lse": lse}


def project(call: BlockCall, weights: BlockWeights, internals: Mapping[str, Tensor]) -> Tensor:
    """The branch, rows `[N, dim]`."""
    return call.total(weights.out(_rows(internals["out"])))


def backward(
    call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], needs_x: bool, x: Tensor,
    internals: dict[str, Tensor], shared: Shared,
) -> tuple[Tensor | None, Gradients]:  # fmt: skip
    """Gradients of x, as rows (None unless `needs_x`), and of this half's parameters.

    Empties `internals` as it goes. They have, beside those of forward and of `Half.joint`, rows of two gradients: "grad_mid" of what the
    branch and the stream make where they join, and "grad_stream" of x on all other paths, where that is not what the join itself gives.
    """
    half = halves(call.spec).attention
    dropout = call.dropout(shared).attention_residual
    grad_branch, onto, grads = half.through_join(call, weights, needs, internals.pop("grad_mid"), internals, dropout)
    onto = internals.pop("grad_stream", onto)
    grad_branch = grad_branch.to(call.dtype)
    grads["out"] = weights.out.grad_tensors(grad_branch, _rows(internals["out"]), needs["out"])
    needs_rows = needs_x or (half.entry is not None and any(needs[half.entry]))
    if needs_rows or any(any(needs.get(part, ())) for part in _INSIDE):
        scoring = call.scoring(weights, x, shared)
        rows, grad_sinks = _through_attention(call, weights.out, grad_branch, x, internals, scoring, shared)
        del grad_branch
        if grad_sinks is not None:
            grads["sinks"] = [_whole_sinks(call, grad_sinks) if needs["sinks"][0] else None]
        stats = internals.pop("stats", None)
        normed = internals.pop("normed", None)
        reads_rows = needs_rows and any(getattr(weights, part).kind.reads_rows for part in "qkv")
        if normed is None and (reads_rows or any(any(needs[part]) for part in "qkv")):
            normed = half.enter(call, weights, flat(x))[0]
        grad_normed = None
        for part in "qkv":
            projection: Projection = getattr(weights, part)
            grad = rows.pop(part)
            if f"raw_{part}" in internals:
                norm = f"{part}_norm"
                grad, grads[norm] = _through_qk_norm(call, grad, part, getattr(weights, norm), needs[norm], internals)
            grads[part] = [None] * len(needs[part]) if normed is None else projection.grad_tensors(grad, normed, needs[part])
            if needs_rows:
                grad_normed = projection.grad_input(grad, into=grad_normed, x=normed)
        del normed, grad
        if grad_normed is not None:
            grad_normed = call.total(grad_normed)
        grad_rows, entry_grads = half.through_entry(
            call, weights, needs, grad_normed, flat(x), stats, onto=onto if needs_x else None
        )
        grads |= entry_grads
    else:
        grad_rows = None
    grads = {part: in_dtype_of(grads[part], getattr(weights, part)) for part in grads}
    return grad_rows, grads


def _through_attention(
    call: BlockCall, out_proj: Projection, grad_branch: Tensor, x: Tensor, internals: dict[str, Tensor], scoring: Scoring, shared: Shared
) -> tuple[dict[str, Tensor], Tensor | None]:
    """From the gradient of what `out_proj` gives: gradients of q, k and v before their rotation, as rows `[N, heads * D]` by name, and of
    the sinks; by groups of heads.

    They take the places of q, k and v, which are of no further use, but where those are saved tensors.
    """
    q, k, v, out, lse = (internals.pop(name) for name in ("q", "k", "v", "out", "lse"))
    results = [torch.empty_like(t) for t in (q, k, v)] if call.save == "all" else [q, k, v]
    grad_sinks: list[Tensor | None] = []
    for (heads, kv_heads), grad_out in zip(_groups(call), _grad_out(call, out_proj, grad_branch, x, out), strict=True):
        *grads, group_sinks = call.backend.attention_backward(
            grad_out, q[:, heads], k[:, kv_heads], v[:, kv_heads], out[:, heads], lse[:, heads],
            scoring.of_heads(heads, call.spec.heads, q.size(2)),
        )  # fmt: skip
        grad_sinks.append(group_sinks)
        for result, grad, place, turned in zip(results, grads, (heads, kv_heads, kv_heads), (True, True, False), strict=True):
            if turned and shared.table is not None:
                grad = call.backend.rotate(grad, *shared.table, inverse=True)
            result[:, place] = grad
    rows = {name: _rows(result) for name, result in zip("qkv", results, strict=True)}
    return rows, None if scoring.sinks is None else torch.cat([grad for grad in grad_sinks if grad is not None])


def _grad_out(call: BlockCall, out_proj: Projection, grad_branch: Tensor, x: Tensor, out: Tensor) -> Iterator[Tensor]:
    """The gradient of the attention output `out`, `[B, heads, T, D]`, of each group of heads: made when its turn comes, where `out_proj`
    can be cut."""
    if not out_proj.kind.cuttable:
        whole = _heads(call, out_proj.grad_input(grad_branch, x=_rows(out)), x)
        yield from (whole[:, heads] for heads, _ in _groups(call))
        return
    for heads, _ in _groups(call):
        columns = slice(heads.start * call.spec.head_dim, heads.stop * call.spec.head_dim)
        part = out_proj.kind.bind(out_proj.kind.columns(out_proj.tensors, columns))
        yield _heads(call, part.grad_input(grad_branch), x)


def _groups(call: BlockCall) -> Iterator[tuple[slice, slice]]:
    """Query heads and their key heads."""
    spec = call.spec
    for kv_heads in spans(spec.kv_heads, spec.kv_heads // call.slicing.head_groups):
        yield slice(*(bound * (spec.heads // spec.kv_heads) for bound in (kv_heads.start, kv_heads.stop))), kv_heads


def _through_qk_norm(
    call: BlockCall, grad: Tensor, part: str, norm: NormWeights, needs: Sequence[bool], internals: dict[str, Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradient of the rows of q or k before their norm, given that after it, and of the norm's tensors."""
    raw, stats = internals.pop(f"raw_{part}"), internals.pop(f"{part}_stats")
    grad_raw, *grad_params = call.backend.norm_backward(
        _norm_rows(call.spec, grad), _norm_rows(call.spec, raw), *norm, stats, call.norm, params=any(needs)
    )
    # One norm for all heads, of which each rank has some.
    return grad_raw.view(raw.shape), [
        call.total(g) if need and g is not None else None for g, need in zip(grad_params, needs, strict=True)
    ]


def _whole_sinks(call: BlockCall, grad: Tensor) -> Tensor:
    """The gradient of all heads' sinks, given that of this rank's heads."""
    if call.across is None:
        return grad
    whole = grad.new_zeros(grad.numel() * call.across.size)
    whole[call.across.heads(call.spec)] = grad
    return call.total(whole)


def _norm_rows(spec: BlockSpec, rows: Tensor) -> Tensor:
    """Rows `[N, heads * D]` as the rows that `spec.qk_norm` normalises."""
    return rows.view(-1, spec.head_dim) if spec.qk_norm == "head" else rows


def _heads(call: BlockCall, rows: Tensor, x: Tensor) -> Tensor:
    """`[N, heads * D]` as `[B, heads, T, D]`, without a copy."""
    batch, length, _ = x.shape
    head_dim = call.spec.head_dim
    return rows.view(batch, length, rows.size(-1) // head_dim, head_dim).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    """`[B, heads, T, D]`, lying as `[B, T, heads, D]`, as `[N, heads * D]`, without a copy."""
    return heads.transpose(1, 2).flatten(2).flatten(0, 1)
