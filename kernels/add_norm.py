"""The residual sum and the norm behind it in one pass: `total = residual + drop(x)`, `y = norm(total)`.

The norm sees total as it is rounded, hence y and its statistics are those of `norm_forward(total)`, and total is that of `dropout_add`,
bit for bit: the same device functions on the same tiles. Total is written once and not read again.

Not stored: the mask, which a gradient draws anew, and x, which none needs.

A row too wide to be kept in registers is added up tile by tile, and total is then read back by the norm's own kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dropout import dropout_constants, dropout_row_start, dropout_state
from .launch import accumulate_dtype, launch
from .norm import empty_stats, load_tile, norm_forward, normalise
from .primitives import apply_dropout, keep_mask, nearest, ptr_offset, store
from .rows import as_rows
from .tiles import elementwise_tile, norm_tile

_WIDEST = 16384
"""Widest row that is kept in registers from the sum to the norm; a norm alone needs fewer."""


@triton.jit
def _add_norm(
    x_ptr, residual_ptr, total_ptr, state_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, num_rows, num_cols, mask_first_row,
    x_strides, residual_strides, total_strides, weight_strides, bias_strides, y_strides,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr,
    LAYER: tl.constexpr, WHOLE_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = tl.program_id(1) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    in_rows, in_cols = rows < num_rows, cols < num_cols
    mask = in_rows[:, None] & in_cols[None, :]
    total = load_tile(x_ptr, rows, cols, mask, x_strides, ACC)  # [BLOCK_M, BLOCK_N]
    if HAS_DROPOUT:
        keep = keep_mask(state_ptr, mask_first_row + rows, first_col, num_cols, SITE, THRESHOLD, BLOCK_N)
        total = apply_dropout(total, keep, DROPOUT_SCALE)
    total += load_tile(residual_ptr, rows, cols, mask, residual_strides, ACC)  # [BLOCK_M, BLOCK_N]
    total = nearest(total, total_ptr.dtype.element_ty).to(ACC)
    store(total_ptr + ptr_offset((rows[:, None], cols[None, :]), total_strides), total, mask=mask)
    if WHOLE_ROW:
        normalise(
            total, weight_ptr, bias_ptr, y_ptr, stats_ptr, rows, cols, in_rows, in_cols, num_cols,
            weight_strides, bias_strides, y_strides, LAYER, WHOLE_ROW, HAS_BIAS, EPS, OFFSET, ACC,
        )  # fmt: skip


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, kind: str, eps: float, offset: float = 0.0, dropout=None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`(total, y, stats)`: `residual + drop(x)` in residual's dtype, its norm in x's dtype, both contiguous, and its rows' statistics.

    Total is written to `into` where that is given: contiguous, of residual's shape and dtype; x may lie there.
    """
    x_rows, residual_rows = as_rows(x), as_rows(residual)
    num_rows, num_cols = x_rows.shape
    total = torch.empty(residual_rows.shape, dtype=residual.dtype, device=x.device) if into is None else into.view(residual_rows.shape)
    tile = norm_tile(num_cols, total.dtype, x.device)
    whole_row = num_cols <= min(tile.block_n, _WIDEST)
    if not whole_row:
        tile = elementwise_tile(num_cols, total.dtype, x.device)
    y = torch.empty(x_rows.shape, dtype=x.dtype, device=x.device) if whole_row else None
    stats = empty_stats(total, kind) if whole_row else None
    launch(
        _add_norm, (triton.cdiv(num_rows, tile.block_m), triton.cdiv(num_cols, tile.block_n)),
        x_rows, residual_rows, total, dropout_state(dropout), weight, bias, y, stats, num_rows, num_cols, dropout_row_start(dropout),
        x_rows.stride(), residual_rows.stride(), total.stride(),
        weight.stride(), None if bias is None else bias.stride(), None if y is None else y.stride(),
        **dropout_constants(dropout), LAYER=kind == "layer", WHOLE_ROW=whole_row, HAS_BIAS=bias is not None, EPS=eps, OFFSET=offset,
        ACC=accumulate_dtype(total.dtype), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    if y is None or stats is None:
        y, stats = norm_forward(total, weight, bias, kind=kind, eps=eps, offset=offset, dtype=x.dtype)
    return total.view(residual.shape), y.view(x.shape), stats
