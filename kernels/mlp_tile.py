"""What the fused MLP kernels share: a tile of gate and up, `[BLOCK_M, BLOCK_N]` each, out of rows that may have yet to be normalised.

    normed = (x - mean) * rstd * (weight + offset) + bias        as in norm.py, mean = 0 for "rms"
    gate   = normed @ Wg.T + bg,   up = normed @ Wu.T + bu       one walk over the rows serves both

A tile of rows is normalised when it is loaded and rounded as norm.py would have stored it; gate and up are rounded as a matrix product
would have stored them. So a run that keeps them computes with the same numbers as one that makes them again.

Not stored: normed rows, gate, up.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .dropout import dropout_constants, dropout_row_start
from .launch import accumulate_dtype, operand_dtype
from .primitives import dot, nearest, ptr_offset
from .tiles import Tile

# Tiles of rows that are worked on side by side. They read the same tiles of the weights at about the same time, hence once from memory,
# and their own rows stay in the L2 cache: 1024 rows of 4096 bfloat16 are 8 MiB.
_GROUP = tl.constexpr(8)
# What follows the products is done for so many columns at a time: the more, the more intermediate values beside the two sums in registers.
WRITTEN_COLS = tl.constexpr(32)


class Norm(NamedTuple):
    """What a norm does to rows besides their statistics: "rms" or "layer", weight and bias `[dim]`, and what is added to the weight."""

    kind: str
    weight: Tensor
    bias: Tensor | None = None
    offset: float = 0.0


@triton.jit
def grouped_tile(num_rows, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and first column of this program's tile: down the rows of a group of tiles first, then along the columns."""
    group_programs = _GROUP * tl.cdiv(num_cols, BLOCK_N)
    group, within = tl.program_id(0) // group_programs, tl.program_id(0) % group_programs
    height = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - group * _GROUP, _GROUP)
    rows = group * (_GROUP * BLOCK_M) + within % height * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows, within // height * BLOCK_N


@triton.jit
def halves(tile):
    """The left and the right columns of a tile."""
    return tl.split(tl.trans(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _load_stats(stats_ptr, rows, in_rows, NORM: tl.constexpr):
    """mean and rstd of `rows`; an RMS norm has no mean, and none of it is used."""
    last = tl.cast(rows, tl.int64) * 2 + 1 if NORM == "layer" else tl.cast(rows, tl.int64)
    rstd = tl.load(stats_ptr + last, mask=in_rows, other=0.0)
    mean = tl.load(stats_ptr + last - 1, mask=in_rows, other=0.0) if NORM == "layer" else rstd
    return mean, rstd


@triton.jit
def _normalise(x, mean, rstd, weight_ptr, bias_ptr, dims, in_dim, NORM: tl.constexpr, OFFSET: tl.constexpr):
    """A tile of rows as norm.py stores it, in x's dtype."""
    centred = x.to(rstd.dtype)
    scale = tl.load(weight_ptr + dims, mask=in_dim, other=0.0).to(rstd.dtype) + OFFSET
    if NORM == "layer":
        centred -= mean[:, None]
        # Outside of the row there is -mean now: where float16 made it an infinity, the zeros of the weights would not make it zero.
        scale = tl.where(in_dim, scale, 0.0)
    y = centred * rstd[:, None] * scale[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + dims, mask=in_dim, other=0.0).to(rstd.dtype)[None, :]
    return nearest(y, x.dtype)


@triton.jit
def _finish(product, bias_ptr, cols, num_cols, DTYPE: tl.constexpr):
    """A product with its bias, rounded to DTYPE."""
    if bias_ptr is not None:
        product += tl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(product.dtype)[None, :]
    return nearest(product, DTYPE)


@triton.jit
def gate_and_up(
    x_ptr, stats_ptr, norm_weight_ptr, norm_bias_ptr, gate_weight_ptr, up_weight_ptr, gate_bias_ptr, up_bias_ptr,
    rows, first_col, num_rows, num_cols, dim, x_strides, gate_weight_strides, up_weight_strides,
    GATED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, ACC: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """gate and up at `rows` and at the columns from `first_col` on, in the weights' dtype; gate is of no meaning unless GATED."""
    dtype: tl.constexpr = up_weight_ptr.dtype.element_ty
    cols = first_col + tl.arange(0, BLOCK_N)
    in_rows, in_cols = rows < num_rows, cols < num_cols
    depths = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + ptr_offset((rows[:, None], depths[None, :]), x_strides)
    up_tile = up_weight_ptr + ptr_offset((cols[None, :], depths[:, None]), up_weight_strides)
    gate = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    up = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    if GATED:
        gate_tile = gate_weight_ptr + ptr_offset((cols[None, :], depths[:, None]), gate_weight_strides)
    if NORM is not None:
        mean, rstd = _load_stats(stats_ptr, rows, in_rows, NORM)
    for first in range(0, dim, BLOCK_K):
        in_depth = first + depths < dim
        in_weight = in_depth[:, None] & in_cols[None, :]
        x_step = ptr_offset((first,), (x_strides[1],))
        x = tl.load(x_tile + x_step, mask=in_rows[:, None] & in_depth[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        if NORM is not None:
            x = _normalise(x, mean, rstd, norm_weight_ptr, norm_bias_ptr, first + depths, in_depth, NORM, OFFSET)
        x = nearest(x, dtype)
        if GATED:
            gate_step = ptr_offset((first,), (gate_weight_strides[1],))
            gate = dot(x, tl.load(gate_tile + gate_step, mask=in_weight, other=0.0), gate, OPERAND)  # [BLOCK_M, BLOCK_N]
        up_step = ptr_offset((first,), (up_weight_strides[1],))
        up = dot(x, tl.load(up_tile + up_step, mask=in_weight, other=0.0), up, OPERAND)  # [BLOCK_M, BLOCK_N]
    return _finish(gate, gate_bias_ptr, cols, num_cols, dtype), _finish(up, up_bias_ptr, cols, num_cols, dtype)


class Arguments(NamedTuple):
    """What the launches of forward and backward share."""

    grid: tuple[int]
    inputs: tuple
    strides: tuple
    integers: tuple[int, int, int, int]
    constexprs: dict[str, Any]


def launch_arguments(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, b_gate: Tensor | None, b_up: Tensor | None, norm: Norm | None, stats: Tensor | None,
    pointwise: str, dropout, tile: Tile,
) -> Arguments:  # fmt: skip
    """The grid of `grouped_tile`, the tensors and strides of `gate_and_up` in its order, the integers, and the constexprs of `tile`."""
    (num_rows, dim), num_cols = x.shape, w_up.size(0)
    vectors = None if norm is None else norm.weight, None if norm is None else norm.bias, b_gate, b_up
    norm_weight, norm_bias, b_gate, b_up = (None if vector is None else vector.contiguous() for vector in vectors)
    gate_strides = None if w_gate is None else w_gate.stride()
    constexprs = {
        "GATED": w_gate is not None, "NORM": None if norm is None else norm.kind, "OFFSET": 0.0 if norm is None else norm.offset,
        "POINTWISE": pointwise, **dropout_constants(dropout), "ACC": accumulate_dtype(w_up.dtype), "OPERAND": operand_dtype(w_up.dtype),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False,
    }  # fmt: skip
    return Arguments(
        grid=(triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_cols, tile.block_n),),
        inputs=(x, stats, norm_weight, norm_bias, w_gate, w_up, b_gate, b_up),
        strides=(x.stride(), gate_strides, w_up.stride()),
        integers=(num_rows, num_cols, dim, dropout_row_start(dropout)),
        constexprs=constexprs,
    )
