"""Attention backward: gradients of q, k and v, with the weights rebuilt from q, k and lse.

Forward, for one head, with mask D = keep / (1 - p):  S = scale q k^T,  P = exp(S - lse),  out = (P * D) v.  Given G = d loss / d out:

    dv = (P * D)^T G                            out is linear in v
    dP = (G v^T) * D                            and in P * D
    dS = P * (dP - rowsum(P * dP))              softmax: P's rows sum to 1
    rowsum(P * dP) = rowsum(G * out) = delta    as sum_j P_ij D_ij (G v^T)_ij = G_i . out_i
    dq = scale dS k,  dk = scale dS^T q         S is linear in q and in k

With a softcap, S = cap tanh(s / cap) and s = scale q k^T; then dS has the factor 1 - tanh(s / cap)^2 on its way to q and k. A sink's weight
is one more column of P that meets no value, hence d sink = -sum_i exp(sink - lse_i) delta_i.

P's rows need no sum here, so each tile of P stands alone: one kernel walks the queries of a tile of keys for dk and dv, another the keys of
a tile of queries for dq. Both rebuild P, which costs two products more than sharing it, and in return no sum is shared between programs:
no atomics, the same bits every time. Under grouped queries dk and dv sum over the group's heads inside the program. masking.py says which
tiles a program visits.

Stored between forward and backward: q, k, v, out, lse. Not stored: scores, weights, dropout masks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_forward import LOG2_E, capped_scores, first_dropout_row, locate
from .dropout import dropout_batch_rows, dropout_constants, dropout_row_start, dropout_state
from .launch import accumulate_dtype, launch, operand_dtype
from .masking import key_phases, key_ranges, mask_constants, mask_pointers, mask_strides, query_phases, query_ranges, tile_demands, visible
from .primitives import apply_dropout, dot, head_start, keep_mask, load_rows, store_rows
from .segments import key_spans, query_spans
from .tiles import Tile, attention_backward_tile


@triton.jit
def _load_lse_log2(lse_ptr, rows, inside):
    """lse in base 2. A row that saw no key has lse -inf; +inf in its place makes all its rebuilt weights 0."""
    lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def _attention_delta(
    grad_ptr, out_ptr, delta_ptr, grad_strides, out_strides, heads, query_count,
    HEAD_DIM: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, head, tile = locate(heads, tl.cdiv(query_count, BLOCK_M))
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    rows = tl.cast(batch * heads + head, tl.int64) * query_count + queries
    grad = load_rows(head_start(grad_ptr, batch, head, grad_strides), grad_strides, queries, query_count, dims, HEAD_DIM)
    out = load_rows(head_start(out_ptr, batch, head, out_strides), out_strides, queries, query_count, dims, HEAD_DIM)
    tl.store(delta_ptr + rows, tl.sum(grad.to(ACC) * out.to(ACC), 1), mask=queries < query_count)


@triton.jit
def _walk_queries(
    grad_key, grad_value, key, value, q_head_ptr, grad_head_ptr, lse_ptr, delta_ptr, state_ptr, q_strides, grad_strides,
    mask, keys, first_row, dropout_row, first_key, dims, first_query, end_query, query_count, key_count,
    MASKED: tl.constexpr, BEHIND: tl.constexpr, AHEAD: tl.constexpr, HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys after queries `first_query..end_query` of one head; MASKED where some may not see some key.

    Scores stand transposed, [keys, queries], so that weights and their gradients feed the second products as they are. Lanes beyond
    the last query need no mask: their query and gradient are 0, and with lse 0 and delta 0 all that they add is 0.
    """
    for start in range(first_query, end_query, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        inside = queries < query_count
        query = load_rows(q_head_ptr, q_strides, queries, query_count, dims, HEAD_DIM)  # [BLOCK_M, BLOCK_D]
        grad = load_rows(grad_head_ptr, grad_strides, queries, query_count, dims, HEAD_DIM)
        lse_log2 = _load_lse_log2(lse_ptr, first_row + queries, inside)
        delta = tl.load(delta_ptr + first_row + queries, mask=inside, other=0.0)

        zeros = tl.zeros((BLOCK_N, BLOCK_M), grad_key.dtype)
        scores, tangents = capped_scores(dot(key, tl.trans(query), zeros, OPERAND), SCALE, SOFTCAP)
        if MASKED:
            seen = visible(mask, queries[None, :], keys[:, None], query_count, key_count, BEHIND, AHEAD)
            scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp2(scores - lse_log2[None, :])
        grad_weights = dot(value, tl.trans(grad), zeros, OPERAND)
        dropped = weights
        if HAS_DROPOUT:
            keep = tl.trans(keep_mask(state_ptr, dropout_row + queries, first_key, key_count, SITE, THRESHOLD, BLOCK_N))
            dropped = apply_dropout(weights, keep, DROPOUT_SCALE)
            grad_weights = apply_dropout(grad_weights, keep, DROPOUT_SCALE)
        grad_value = dot(dropped, grad, grad_value, OPERAND)
        grad_scores = weights * (grad_weights - delta[None, :])
        if SOFTCAP is not None:
            grad_scores *= 1 - tangents * tangents
        grad_key = dot(grad_scores, query, grad_key, OPERAND)
    return grad_key, grad_value


@triton.jit
def _attention_backward_keys(
    grad_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, state_ptr, mask_ptrs,
    grad_strides, q_strides, k_strides, v_strides, dk_strides, dv_strides, mask_strides,
    heads, kv_heads, query_count, key_count, dropout_first_row, dropout_batch_rows,
    BEHIND: tl.constexpr, AHEAD: tl.constexpr, PHASES: tl.constexpr, HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, kv_head, tile = locate(kv_heads, tl.cdiv(key_count, BLOCK_N))
    first_key = tile * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    key = load_rows(head_start(k_ptr, batch, kv_head, k_strides), k_strides, keys, key_count, dims, HEAD_DIM)
    value = load_rows(head_start(v_ptr, batch, kv_head, v_strides), v_strides, keys, key_count, dims, HEAD_DIM)
    grad_key = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    grad_value = tl.zeros((BLOCK_N, BLOCK_D), ACC)

    bounds = query_ranges((mask_ptrs, mask_strides, batch, 0), first_key, query_count, key_count, BEHIND, AHEAD, BLOCK_M, BLOCK_N)
    group = heads // kv_heads
    for head in range(kv_head * group, kv_head * group + group):
        first_row = tl.cast(batch * heads + head, tl.int64) * query_count
        dropout_row = first_dropout_row(dropout_first_row, dropout_batch_rows, batch, head, query_count)
        q_head_ptr = head_start(q_ptr, batch, head, q_strides)
        grad_head_ptr = head_start(grad_ptr, batch, head, grad_strides)
        mask = mask_ptrs, mask_strides, batch, head
        for phase in tl.static_range(3):
            if PHASES[phase]:
                grad_key, grad_value = _walk_queries(
                    grad_key, grad_value, key, value, q_head_ptr, grad_head_ptr, lse_ptr, delta_ptr, state_ptr, q_strides, grad_strides,
                    mask, keys, first_row, dropout_row, first_key, dims, bounds[phase], bounds[phase + 1], query_count, key_count,
                    phase != 1, BEHIND, AHEAD, HEAD_DIM, SCALE, SOFTCAP,
                    HAS_DROPOUT, SITE, THRESHOLD, DROPOUT_SCALE, OPERAND, BLOCK_M, BLOCK_N,
                )  # fmt: skip

    store_rows(head_start(dk_ptr, batch, kv_head, dk_strides), dk_strides, keys, key_count, dims, grad_key * SCALE, HEAD_DIM)
    store_rows(head_start(dv_ptr, batch, kv_head, dv_strides), dv_strides, keys, key_count, dims, grad_value, HEAD_DIM)


@triton.jit
def _walk_keys(
    grad_query, query, grad, lse_log2, delta, k_head_ptr, v_head_ptr, state_ptr, k_strides, v_strides,
    mask, queries, dropout_rows, dims, first_key, end_key, query_count, key_count,
    MASKED: tl.constexpr, BEHIND: tl.constexpr, AHEAD: tl.constexpr, HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries after keys `first_key..end_key`; MASKED where some may be hidden."""
    for start in range(first_key, end_key, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        key = load_rows(k_head_ptr, k_strides, keys, key_count, dims, HEAD_DIM)  # [BLOCK_N, BLOCK_D]
        value = load_rows(v_head_ptr, v_strides, keys, key_count, dims, HEAD_DIM)
        zeros = tl.zeros((BLOCK_M, BLOCK_N), grad_query.dtype)
        scores, tangents = capped_scores(dot(query, tl.trans(key), zeros, OPERAND), SCALE, SOFTCAP)
        if MASKED:
            seen = visible(mask, queries[:, None], keys[None, :], query_count, key_count, BEHIND, AHEAD)
            scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp2(scores - lse_log2[:, None])
        grad_weights = dot(grad, tl.trans(value), zeros, OPERAND)
        if HAS_DROPOUT:
            keep = keep_mask(state_ptr, dropout_rows, start, key_count, SITE, THRESHOLD, BLOCK_N)
            grad_weights = apply_dropout(grad_weights, keep, DROPOUT_SCALE)
        grad_scores = weights * (grad_weights - delta[:, None])
        if SOFTCAP is not None:
            grad_scores *= 1 - tangents * tangents
        grad_query = dot(grad_scores, key, grad_query, OPERAND)
    return grad_query


@triton.jit
def _attention_backward_queries(
    grad_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr, state_ptr, mask_ptrs,
    grad_strides, q_strides, k_strides, v_strides, dq_strides, mask_strides,
    heads, kv_heads, query_count, key_count, dropout_first_row, dropout_batch_rows,
    BEHIND: tl.constexpr, AHEAD: tl.constexpr, PHASES: tl.constexpr, HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(query_count, BLOCK_M)
    batch, head, tile = locate(heads, tiles)
    first_query = (tiles - 1 - tile) * BLOCK_M  # the last queries see most keys, so they start first
    kv_head = head // (heads // kv_heads)
    queries = first_query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    rows = tl.cast(batch * heads + head, tl.int64) * query_count + queries
    mask = mask_ptrs, mask_strides, batch, head
    dropout_rows = first_dropout_row(dropout_first_row, dropout_batch_rows, batch, head, query_count) + queries

    query = load_rows(head_start(q_ptr, batch, head, q_strides), q_strides, queries, query_count, dims, HEAD_DIM)
    grad = load_rows(head_start(grad_ptr, batch, head, grad_strides), grad_strides, queries, query_count, dims, HEAD_DIM)
    lse_log2 = _load_lse_log2(lse_ptr, rows, queries < query_count)
    delta = tl.load(delta_ptr + rows, mask=queries < query_count, other=0.0)
    k_head_ptr = head_start(k_ptr, batch, kv_head, k_strides)
    v_head_ptr = head_start(v_ptr, batch, kv_head, v_strides)
    grad_query = tl.zeros((BLOCK_M, BLOCK_D), ACC)

    bounds = key_ranges(mask, first_query, query_count, key_count, BEHIND, AHEAD, BLOCK_M, BLOCK_N)
    for phase in tl.static_range(3):
        if PHASES[phase]:
            grad_query = _walk_keys(
                grad_query, query, grad, lse_log2, delta, k_head_ptr, v_head_ptr, state_ptr, k_strides, v_strides,
                mask, queries, dropout_rows, dims, bounds[phase], bounds[phase + 1], query_count, key_count,
                phase != 1, BEHIND, AHEAD, HEAD_DIM, SCALE, SOFTCAP,
                HAS_DROPOUT, SITE, THRESHOLD, DROPOUT_SCALE, OPERAND, BLOCK_M, BLOCK_N,
            )  # fmt: skip

    store_rows(head_start(dq_ptr, batch, head, dq_strides), dq_strides, queries, query_count, dims, grad_query * SCALE, HEAD_DIM)


def _sink_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    weights = weights.masked_fill(lse == -torch.inf, 0.0)  # the row saw no key, and its sink is -inf
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    mask, scale: float, softcap: float | None = None, sinks: Tensor | None = None, dropout=None, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`(dq, dk, dv, dsinks)` for `grad [B, H, Tq, D]`, the first three lying in memory as `[B, T, H, D]`, the last None without sinks.

    The other arguments are as in `attention_forward`.
    """
    batch, heads, query_count, head_dim = q.shape
    kv_heads, key_count = k.shape[1:3]
    tile = tile or attention_backward_tile(head_dim, q.dtype, q.device, **tile_demands(mask, softcap, dropout))
    dq, dk, dv = (torch.empty(x.transpose(1, 2).shape, dtype=x.dtype, device=x.device).transpose(1, 2) for x in (q, k, v))
    lse = lse.contiguous()  # a slice of heads is not
    delta = torch.empty_like(lse)
    dropout_rows = dropout_row_start(dropout), dropout_batch_rows(dropout, heads * query_count)
    integers = heads, kv_heads, query_count, key_count, *dropout_rows
    query_grid = (batch * heads * triton.cdiv(query_count, tile.block_m),)
    key_grid = (batch * kv_heads * triton.cdiv(key_count, tile.block_m),)
    accumulate, block_d = accumulate_dtype(q.dtype), max(16, triton.next_power_of_2(head_dim))
    constants = {
        **mask_constants(mask),
        "HEAD_DIM": head_dim,
        "SCALE": scale,
        "SOFTCAP": softcap,
        **dropout_constants(dropout),
        "ACC": accumulate,
        "OPERAND": operand_dtype(q.dtype),
        "BLOCK_D": block_d,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    launch(
        _attention_delta,
        query_grid,
        grad, out, delta, grad.stride(), out.stride(), heads, query_count,
        HEAD_DIM=head_dim,
        ACC=accumulate,
        BLOCK_M=tile.block_m,
        BLOCK_D=block_d,
    )  # fmt: skip
    launch(
        _attention_backward_keys,
        key_grid,
        grad, q, k, v, lse, delta, dk, dv, dropout_state(dropout), mask_pointers(mask, query_spans(mask, tile.block_m)),
        grad.stride(), q.stride(), k.stride(), v.stride(), dk.stride(), dv.stride(), mask_strides(mask),
        *integers,
        PHASES=query_phases(mask),
        BLOCK_M=tile.block_n,
        BLOCK_N=tile.block_m,
        **constants,
    )  # fmt: skip
    launch(
        _attention_backward_queries,
        query_grid,
        grad, q, k, v, lse, delta, dq, dropout_state(dropout), mask_pointers(mask, key_spans(mask, tile.block_m)),
        grad.stride(), q.stride(), k.stride(), v.stride(), dq.stride(), mask_strides(mask),
        *integers,
        PHASES=key_phases(mask),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        **constants,
    )  # fmt: skip
    return dq, dk, dv, _sink_gradient(sinks, lse, delta)
