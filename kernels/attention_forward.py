"""Attention forward: `out = drop(softmax(mask(cap(scale * q @ k.T)))) @ v`, one tile of queries per program, keys in a running softmax.

For each query row the kernel carries, over tiles of keys, the maximum m of the scores, the sum l of exp(score - m) and the weighted sum
of values; when m grows, l and the sum are rescaled (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). At the end
out = sum / l and lse = m + log(l). Dropout leaves l alone: weights are dropped after they are normalised. A sink is a score without a
value that comes before all others: m begins with it, and l with 1. `cap(s) = softcap * tanh(s / softcap)`, or s.

masking.py says which keys a query sees and which tiles of keys a program visits.

Neither scores, nor weights, nor dropout masks are stored. Backward rebuilds them from q, k, lse and 16 bytes of RNG state.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dropout import dropout_batch_rows, dropout_constants, dropout_row_start, dropout_state
from .launch import accumulate_dtype, launch, operand_dtype
from .masking import key_phases, key_ranges, mask_constants, mask_pointers, mask_strides, tile_demands, visible
from .primitives import dot, head_start, keep_mask, load_rows, store_rows, tanh
from .segments import key_spans
from .tiles import Tile, attention_forward_tile

# Softmax runs in powers of two, which is what the hardware has; the change of base is folded into the scale of the scores.
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def locate(heads, tiles):
    """This program's (batch, head, tile) in a one-dimensional grid.

    Only axis 0 of a grid may exceed 65535, and batch * heads can. Tiles of one head are neighbours, and so are the heads of a group:
    programs that run at the same time read the same keys and values, once from memory and then from the L2 cache.
    """
    head = tl.program_id(0) // tiles
    return head // heads, head % heads, tl.program_id(0) % tiles


@triton.jit
def first_dropout_row(dropout_first_row, dropout_batch_rows, batch, head, query_count):
    """The row of the dropout mask that belongs to the first query of a head."""
    return dropout_first_row + tl.cast(batch, tl.int64) * dropout_batch_rows + tl.cast(head, tl.int64) * query_count


@triton.jit
def capped_scores(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Base-2 scores of the products q k^T, and with a softcap the tangents that they are multiples of."""
    if SOFTCAP is None:
        tangents = products
        scores = products * (SCALE * LOG2_E)
    else:
        tangents = tanh(products * (SCALE / SOFTCAP))
        scores = tangents * (SOFTCAP * LOG2_E)
    return scores, tangents


@triton.jit
def online_softmax_step(scores, running_max, running_sum):
    """Take in a tile of base-2 scores: its weights, the new maximum and sum, and the factor for what was summed before."""
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    # A row that has seen no key yet has maximum -inf. Any finite shift gives it weights 0, where -inf - -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    return weights, new_max, running_sum * rescale + tl.sum(weights, 1), rescale


@triton.jit
def _attend(
    accumulator, running_max, running_sum, query, k_head_ptr, v_head_ptr, state_ptr, k_strides, v_strides,
    mask, queries, dropout_rows, dims, first_key, end_key, query_count, key_count,
    MASKED: tl.constexpr, BEHIND: tl.constexpr, AHEAD: tl.constexpr, HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax state and weighted values after keys `first_key..end_key`; MASKED where some may be hidden."""
    # A second buffer for the sum, which is rescaled at each step and cannot use one, would cost Blackwell a program a multiprocessor.
    for start in tl.range(first_key, end_key, BLOCK_N, disallow_acc_multi_buffer=True):
        keys = start + tl.arange(0, BLOCK_N)
        key = load_rows(k_head_ptr, k_strides, keys, key_count, dims, HEAD_DIM)  # [BLOCK_N, BLOCK_D]
        products = dot(query, tl.trans(key), tl.zeros((BLOCK_M, BLOCK_N), accumulator.dtype), OPERAND)
        scores, _ = capped_scores(products, SCALE, SOFTCAP)
        if MASKED:
            seen = visible(mask, queries[:, None], keys[None, :], query_count, key_count, BEHIND, AHEAD)
            scores = tl.where(seen, scores, float("-inf"))
        weights, running_max, running_sum, rescale = online_softmax_step(scores, running_max, running_sum)
        if HAS_DROPOUT:
            keep = keep_mask(state_ptr, dropout_rows, start, key_count, SITE, THRESHOLD, BLOCK_N)
            weights = tl.where(keep, weights, 0.0)
        value = load_rows(v_head_ptr, v_strides, keys, key_count, dims, HEAD_DIM)  # [BLOCK_N, BLOCK_D]
        accumulator = dot(weights, value, accumulator * rescale[:, None], OPERAND)
    return accumulator, running_max, running_sum


@triton.jit
def _attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, state_ptr, mask_ptrs,
    q_strides, k_strides, v_strides, out_strides, mask_strides,
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
    mask = mask_ptrs, mask_strides, batch, head
    dropout_rows = first_dropout_row(dropout_first_row, dropout_batch_rows, batch, head, query_count) + queries

    query = load_rows(head_start(q_ptr, batch, head, q_strides), q_strides, queries, query_count, dims, HEAD_DIM)
    k_head_ptr = head_start(k_ptr, batch, kv_head, k_strides)
    v_head_ptr = head_start(v_ptr, batch, kv_head, v_strides)
    accumulator = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    if sinks_ptr is None:
        running_max = tl.full((BLOCK_M,), float("-inf"), ACC)
        running_sum = tl.zeros((BLOCK_M,), ACC)
    else:
        running_max = tl.zeros((BLOCK_M,), ACC) + tl.load(sinks_ptr + head).to(ACC) * LOG2_E
        running_sum = tl.full((BLOCK_M,), 1.0, ACC)

    bounds = key_ranges(mask, first_query, query_count, key_count, BEHIND, AHEAD, BLOCK_M, BLOCK_N)
    for phase in tl.static_range(3):
        if PHASES[phase]:
            accumulator, running_max, running_sum = _attend(
                accumulator, running_max, running_sum, query, k_head_ptr, v_head_ptr, state_ptr, k_strides, v_strides,
                mask, queries, dropout_rows, dims, bounds[phase], bounds[phase + 1], query_count, key_count,
                phase != 1, BEHIND, AHEAD, HEAD_DIM, SCALE, SOFTCAP, HAS_DROPOUT, SITE, THRESHOLD, OPERAND, BLOCK_M, BLOCK_N,
            )  # fmt: skip

    # A row that saw no key and has no sink has sum 0 and maximum -inf: its output is 0 and its lse -inf.
    total = tl.where(running_sum == 0, 1.0, running_sum)
    out = accumulator * (DROPOUT_SCALE / total)[:, None]
    store_rows(head_start(out_ptr, batch, head, out_strides), out_strides, queries, query_count, dims, out, HEAD_DIM)
    rows = tl.cast(batch * heads + head, tl.int64) * query_count + queries
    tl.store(lse_ptr + rows, (running_max + tl.log2(total)) * LN_2, mask=queries < query_count)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *,
    mask, scale: float, softcap: float | None = None, sinks: Tensor | None = None, dropout=None, tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out [B, H, Tq, D], lse [B, H, Tq])` of `q [B, H, Tq, D]` and `k, v [B, KV, Tk, D]`, KV a divisor of H, with any strides.

    `mask` is as in masking.py, `sinks` `[H]`. `out` lies in memory as `[B, Tq, H, D]`; lse is a natural logarithm with the sink in it. A
    query that sees no key gets zeros and, unless there is a sink, lse -inf.
    """
    batch, heads, query_count, head_dim = q.shape
    kv_heads, key_count = k.shape[1:3]
    tile = tile or attention_forward_tile(head_dim, q.dtype, q.device, **tile_demands(mask, softcap, dropout))
    out = torch.empty((batch, query_count, heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty((batch, heads, query_count), dtype=lse_dtype, device=q.device)
    sinks = None if sinks is None else sinks.contiguous()
    launch(
        _attention_forward,
        (batch * heads * triton.cdiv(query_count, tile.block_m),),
        q, k, v, out, lse, sinks, dropout_state(dropout), mask_pointers(mask, key_spans(mask, tile.block_m)),
        q.stride(), k.stride(), v.stride(), out.stride(), mask_strides(mask),
        heads, kv_heads, query_count, key_count, dropout_row_start(dropout), dropout_batch_rows(dropout, heads * query_count),
        **mask_constants(mask),
        PHASES=key_phases(mask),
        HEAD_DIM=head_dim,
        SCALE=scale,
        SOFTCAP=softcap,
        **dropout_constants(dropout),
        ACC=accumulate_dtype(q.dtype),
        OPERAND=operand_dtype(q.dtype),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return out, lse
