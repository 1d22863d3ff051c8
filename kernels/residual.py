"""Dropout of rows, and dropout added to a residual stream: `y = [residual +] drop(x)`.

Element (row, col) of x, its leading dimensions flattened to rows, is kept or dropped by the mask of its site. The gradient of x is
`drop(grad)` under the same mask: neither the mask nor x is stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dropout import dropout_constants, dropout_row_start, dropout_state
from .launch import accumulate_dtype, launch
from .primitives import apply_dropout, keep_mask, ptr_offset, store
from .rows import as_rows, tile_grid, tile_of_program
from .tiles import elementwise_tile


@triton.jit
def _dropout_add(
    x_ptr, residual_ptr, y_ptr, state_ptr, num_rows, num_cols, mask_first_row, x_strides, residual_strides, y_strides,
    HAS_RESIDUAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, first_col, mask = tile_of_program(num_rows, num_cols, BLOCK_M, BLOCK_N)
    element = (rows[:, None], (first_col + tl.arange(0, BLOCK_N))[None, :])
    y = tl.load(x_ptr + ptr_offset(element, x_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    if HAS_DROPOUT:
        y = apply_dropout(y, keep_mask(state_ptr, mask_first_row + rows, first_col, num_cols, SITE, THRESHOLD, BLOCK_N), DROPOUT_SCALE)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + ptr_offset(element, residual_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    store(y_ptr + ptr_offset(element, y_strides), y, mask=mask)


def _launch_dropout_add(x: Tensor, residual: Tensor | None, dropout) -> Tensor:
    x_rows = as_rows(x)
    residual_rows = None if residual is None else as_rows(residual)
    dtype = x.dtype if residual is None else residual.dtype
    y = torch.empty(x_rows.shape, dtype=dtype, device=x.device)
    num_rows, num_cols = x_rows.shape
    tile = elementwise_tile(num_cols, dtype, x.device)
    launch(
        _dropout_add, tile_grid(num_rows, num_cols, tile.block_m, tile.block_n),
        x_rows, residual_rows, y, dropout_state(dropout), num_rows, num_cols, dropout_row_start(dropout),
        x_rows.stride(), None if residual_rows is None else residual_rows.stride(), y.stride(),
        HAS_RESIDUAL=residual is not None, **dropout_constants(dropout), ACC=accumulate_dtype(dtype),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
    )  # fmt: skip
    return y.view(x.shape)


def dropout(x: Tensor, dropout) -> Tensor:
    """`x [..., C]` with elements dropped and the rest scaled by 1 / (1 - p), contiguous; it is its own backward."""
    return _launch_dropout_add(x, None, dropout)


def dropout_add(x: Tensor, residual: Tensor, dropout) -> Tensor:
    """`residual + drop(x)` in residual's dtype, contiguous; without dropout, the plain sum."""
    return _launch_dropout_add(x, residual, dropout)
