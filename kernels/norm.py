"""RMSNorm and LayerNorm over the last dimension, scaled by `weight + offset`, and their gradients.

    y = x_hat * (weight + offset) + bias,   x_hat = (x - mean) * rstd,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)

with mean = 0 for "rms". Everything is computed in the accumulation dtype; only y is rounded.

Backward. With g = grad * (weight + offset), and since rstd depends on x by d rstd / dx = -rstd^2 * x_hat / C,

    dx      = rstd * (g - mean(g) - x_hat * mean(g * x_hat))        without mean(g) for "rms"
    dweight = sum over rows of grad * x_hat
    dbias   = sum over rows of grad

to which, where x lies on a residual path too, its gradient there is added before dx is rounded.

A program walks over some of the rows and writes its own partial dweight and dbias, which a second kernel adds up in a fixed order.

Not stored: x_hat, which backward makes again from x and the statistics, one or two numbers a row.

A row wider than a tile is first reduced by a kernel of its own, and then treated tile by tile like any other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import accumulate_dtype, launch
from .primitives import ptr_offset, store
from .rows import as_rows
from .tiles import column_sum_tile, norm_backward_programs, norm_backward_tile, norm_tile


@triton.jit
def load_tile(ptr, rows, cols, mask, strides, ACC: tl.constexpr):
    """`[rows, cols]` of a matrix in ACC, zero outside of `mask`."""
    return tl.load(ptr + ptr_offset((rows[:, None], cols[None, :]), strides), mask=mask, other=0.0).to(ACC)


@triton.jit
def _centre(x, mask, mean, LAYER: tl.constexpr):
    """`x - mean` for a layer norm, x for an RMS norm, zero outside of the row."""
    return tl.where(mask, x - mean[:, None], 0.0) if LAYER else x


@triton.jit
def _load_stats(stats_ptr, rows, in_rows, LAYER: tl.constexpr):
    """mean and rstd of `rows`; an RMS norm has no mean, and none of it is used."""
    last = tl.cast(rows, tl.int64) * 2 + 1 if LAYER else tl.cast(rows, tl.int64)
    rstd = tl.load(stats_ptr + last, mask=in_rows, other=0.0)
    mean = tl.load(stats_ptr + last - 1, mask=in_rows, other=0.0) if LAYER else rstd
    return mean, rstd


@triton.jit
def _store_stats(stats_ptr, rows, in_rows, mean, rstd, LAYER: tl.constexpr):
    last = tl.cast(rows, tl.int64) * 2 + 1 if LAYER else tl.cast(rows, tl.int64)
    store(stats_ptr + last, rstd, mask=in_rows)
    if LAYER:
        store(stats_ptr + last - 1, mean, mask=in_rows)


@triton.jit
def row_statistics(
    x_ptr, stats_ptr, num_rows, num_cols, x_strides,
    LAYER: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Statistics of rows wider than a tile. The variance is a second pass: E[x^2] - mean^2 would cancel."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < num_rows
    mean = tl.zeros([BLOCK_M], ACC)
    if LAYER:
        for first_col in range(0, num_cols, BLOCK_N):
            cols = first_col + tl.arange(0, BLOCK_N)
            mask = in_rows[:, None] & (cols < num_cols)[None, :]
            mean += tl.sum(load_tile(x_ptr, rows, cols, mask, x_strides, ACC), 1)
        mean = mean / num_cols
    square_sum = tl.zeros([BLOCK_M], ACC)
    for first_col in range(0, num_cols, BLOCK_N):
        cols = first_col + tl.arange(0, BLOCK_N)
        mask = in_rows[:, None] & (cols < num_cols)[None, :]
        centred = _centre(load_tile(x_ptr, rows, cols, mask, x_strides, ACC), mask, mean, LAYER)
        square_sum += tl.sum(centred * centred, 1)
    _store_stats(stats_ptr, rows, in_rows, mean, tl.rsqrt(square_sum / num_cols + EPS), LAYER)


@triton.jit
def normalise(
    x, weight_ptr, bias_ptr, y_ptr, stats_ptr, rows, cols, in_rows, in_cols, num_cols, weight_strides, bias_strides, y_strides,
    LAYER: tl.constexpr, WHOLE_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write y of the tile `x [rows, cols]`, zero outside of the tensor; its statistics are written where rows are whole, else read."""
    mask = in_rows[:, None] & in_cols[None, :]
    if WHOLE_ROW:
        mean = tl.sum(x, 1) / num_cols
        centred = _centre(x, mask, mean, LAYER)
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / num_cols + EPS)
        _store_stats(stats_ptr, rows, in_rows, mean, rstd, LAYER)
    else:
        mean, rstd = _load_stats(stats_ptr, rows, in_rows, LAYER)
        centred = _centre(x, mask, mean, LAYER)
    scale = tl.load(weight_ptr + ptr_offset((cols,), weight_strides), mask=in_cols, other=0.0).to(ACC) + OFFSET
    y = centred * rstd[:, None] * scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + ptr_offset((cols,), bias_strides), mask=in_cols, other=0.0).to(ACC)[None, :]
    store(y_ptr + ptr_offset((rows[:, None], cols[None, :]), y_strides), y, mask=mask)


@triton.jit
def _norm_fwd(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, num_rows, num_cols, x_strides, weight_strides, bias_strides, y_strides,
    LAYER: tl.constexpr, WHOLE_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_cols = rows < num_rows, cols < num_cols
    x = load_tile(x_ptr, rows, cols, in_rows[:, None] & in_cols[None, :], x_strides, ACC)  # [BLOCK_M, BLOCK_N]
    normalise(
        x, weight_ptr, bias_ptr, y_ptr, stats_ptr, rows, cols, in_rows, in_cols, num_cols, weight_strides, bias_strides, y_strides,
        LAYER, WHOLE_ROW, HAS_BIAS, EPS, OFFSET, ACC,
    )  # fmt: skip


@triton.jit
def _load_backward(
    grad_ptr, x_ptr, weight_ptr, rows, cols, in_rows, in_cols, mean, rstd, grad_strides, x_strides, weight_strides,
    LAYER: tl.constexpr, OFFSET: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A tile of grad, of the scaled gradient g and of x_hat, each zero outside of the tensor."""
    mask = in_rows[:, None] & in_cols[None, :]
    scale = tl.load(weight_ptr + ptr_offset((cols,), weight_strides), mask=in_cols, other=0.0).to(ACC) + OFFSET
    grad = load_tile(grad_ptr, rows, cols, mask, grad_strides, ACC)  # [BLOCK_M, BLOCK_N]
    x = load_tile(x_ptr, rows, cols, mask, x_strides, ACC)  # [BLOCK_M, BLOCK_N]
    return grad, grad * scale[None, :], _centre(x, mask, mean, LAYER) * rstd[:, None]


@triton.jit
def _norm_bwd_means(
    grad_ptr, x_ptr, weight_ptr, stats_ptr, means_ptr, num_rows, num_cols, grad_strides, x_strides, weight_strides,
    LAYER: tl.constexpr, OFFSET: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """mean(g) and mean(g * x_hat) of rows wider than a tile."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < num_rows
    mean, rstd = _load_stats(stats_ptr, rows, in_rows, LAYER)
    scaled_sum = tl.zeros([BLOCK_M], ACC)
    product_sum = tl.zeros([BLOCK_M], ACC)
    for first_col in range(0, num_cols, BLOCK_N):
        cols = first_col + tl.arange(0, BLOCK_N)
        _, scaled, x_hat = _load_backward(
            grad_ptr, x_ptr, weight_ptr, rows, cols, in_rows, cols < num_cols, mean, rstd,
            grad_strides, x_strides, weight_strides, LAYER, OFFSET, ACC,
        )  # fmt: skip
        scaled_sum += tl.sum(scaled, 1)
        product_sum += tl.sum(scaled * x_hat, 1)
    store(means_ptr + tl.cast(rows, tl.int64) * 2, scaled_sum / num_cols, mask=in_rows)
    store(means_ptr + tl.cast(rows, tl.int64) * 2 + 1, product_sum / num_cols, mask=in_rows)


@triton.jit
def _norm_bwd(
    grad_ptr, x_ptr, weight_ptr, stats_ptr, means_ptr, onto_ptr, dx_ptr, dweight_ptr, dbias_ptr, num_rows, num_cols,
    grad_strides, x_strides, weight_strides, onto_strides, dx_strides, partial_strides,
    LAYER: tl.constexpr, WHOLE_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ONTO: tl.constexpr, PARAMS: tl.constexpr,
    OFFSET: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_cols = cols < num_cols
    # The sums over rows stay tiles until the end: adding up the rows of a tile once is cheaper than once a step.
    dweight = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for first_row in range(program * BLOCK_M, num_rows, tl.num_programs(0) * BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        in_rows = rows < num_rows
        mean, rstd = _load_stats(stats_ptr, rows, in_rows, LAYER)
        grad, scaled, x_hat = _load_backward(
            grad_ptr, x_ptr, weight_ptr, rows, cols, in_rows, in_cols, mean, rstd,
            grad_strides, x_strides, weight_strides, LAYER, OFFSET, ACC,
        )  # fmt: skip
        if WHOLE_ROW:
            scaled_mean = tl.sum(scaled, 1) / num_cols
            product_mean = tl.sum(scaled * x_hat, 1) / num_cols
        else:
            scaled_mean = tl.load(means_ptr + tl.cast(rows, tl.int64) * 2, mask=in_rows, other=0.0)
            product_mean = tl.load(means_ptr + tl.cast(rows, tl.int64) * 2 + 1, mask=in_rows, other=0.0)
        centred = scaled - scaled_mean[:, None] if LAYER else scaled
        dx = rstd[:, None] * (centred - x_hat * product_mean[:, None])
        mask = in_rows[:, None] & in_cols[None, :]
        if HAS_ONTO:
            dx += load_tile(onto_ptr, rows, cols, mask, onto_strides, ACC)  # [BLOCK_M, BLOCK_N]
        store(dx_ptr + ptr_offset((rows[:, None], cols[None, :]), dx_strides), dx, mask=mask)
        if PARAMS:
            dweight += grad * x_hat
            dbias += grad
    if PARAMS:
        partial = ptr_offset((program, cols), partial_strides)
        store(dweight_ptr + partial, tl.sum(dweight, 0), mask=in_cols)
        if HAS_BIAS:
            store(dbias_ptr + partial, tl.sum(dbias, 0), mask=in_cols)


@triton.jit
def _column_sum(
    partial_ptr, total_ptr, num_rows, num_cols, partial_strides, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_cols = cols < num_cols
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for first_row in range(0, num_rows, BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        total += load_tile(partial_ptr, rows, cols, (rows < num_rows)[:, None] & in_cols[None, :], partial_strides, ACC)
    store(total_ptr + cols, tl.sum(total, 0), mask=in_cols)


def _sum_partials(partials: Tensor, like: Tensor) -> Tensor:
    """The columns of `partials [programs, C]` added up, in `like`'s dtype; zeros where there was no program."""
    total = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    tile = column_sum_tile(partials.device)
    launch(
        _column_sum, (triton.cdiv(total.numel(), tile.block_n),), partials, total, *partials.shape, partials.stride(),
        ACC=accumulate_dtype(partials.dtype), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
    )  # fmt: skip
    return total


def empty_stats(x_rows: Tensor, kind: str) -> Tensor:
    """Room for the statistics of rows: `[rows, 1]` (rms: rstd) or `[rows, 2]` (layer: mean, rstd)."""
    dtype = torch.float64 if x_rows.dtype == torch.float64 else torch.float32
    return torch.empty((x_rows.shape[0], 2 if kind == "layer" else 1), dtype=dtype, device=x_rows.device)


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, kind: str, eps: float, offset: float = 0.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`y` in `dtype` (None: x's), contiguous, and the statistics of its rows, as `empty_stats` describes them."""
    x_rows = as_rows(x)
    num_rows, num_cols = x_rows.shape
    y = torch.empty(x_rows.shape, dtype=x.dtype if dtype is None else dtype, device=x.device)
    stats = empty_stats(x_rows, kind)
    tile = norm_tile(num_cols, x.dtype, x.device)
    row_blocks, col_blocks = triton.cdiv(num_rows, tile.block_m), triton.cdiv(num_cols, tile.block_n)
    shared = {
        "LAYER": kind == "layer", "EPS": eps, "ACC": accumulate_dtype(x.dtype),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "num_warps": tile.num_warps, "enable_fp_fusion": False,
    }  # fmt: skip
    if col_blocks > 1:
        launch(row_statistics, (row_blocks,), x_rows, stats, num_rows, num_cols, x_rows.stride(), **shared)
    launch(
        _norm_fwd, (row_blocks, col_blocks), x_rows, weight, bias, y, stats, num_rows, num_cols,
        x_rows.stride(), weight.stride(), None if bias is None else bias.stride(), y.stride(),
        WHOLE_ROW=col_blocks == 1, HAS_BIAS=bias is not None, OFFSET=offset, **shared,
    )  # fmt: skip
    return y.view(x.shape), stats


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, *, kind: str, offset: float = 0.0, params: bool = True,
    onto: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x (plus `onto`, of its shape), weight and bias, each in its tensor's dtype; the latter two are None unless `params`."""
    grad_rows, x_rows = as_rows(grad), as_rows(x)
    onto_rows = None if onto is None else as_rows(onto)
    num_rows, num_cols = x_rows.shape
    dx = torch.empty(x_rows.shape, dtype=x.dtype, device=x.device)
    tile = norm_backward_tile(num_cols, x.dtype, x.device)
    row_blocks, col_blocks = triton.cdiv(num_rows, tile.block_m), triton.cdiv(num_cols, tile.block_n)
    programs = norm_backward_programs(row_blocks, col_blocks, tile, x.device)
    partials = torch.empty((1 if bias is None else 2, programs if params else 0, num_cols), dtype=stats.dtype, device=x.device)
    weight_partials, bias_partials = partials[0], partials[-1]  # without a bias, nothing is written to the latter
    strides = grad_rows.stride(), x_rows.stride(), weight.stride()
    shared = {
        "LAYER": kind == "layer", "OFFSET": offset, "ACC": accumulate_dtype(x.dtype),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "num_warps": tile.num_warps,
    }  # fmt: skip
    means = None
    if col_blocks > 1:
        means = torch.empty((num_rows, 2), dtype=stats.dtype, device=x.device)
        launch(_norm_bwd_means, (row_blocks,), grad_rows, x_rows, weight, stats, means, num_rows, num_cols, *strides, **shared)
    launch(
        _norm_bwd, (programs, col_blocks), grad_rows, x_rows, weight, stats, means, onto_rows, dx, weight_partials, bias_partials,
        num_rows, num_cols, *strides, None if onto_rows is None else onto_rows.stride(), dx.stride(), weight_partials.stride(),
        WHOLE_ROW=col_blocks == 1, HAS_BIAS=bias is not None, HAS_ONTO=onto is not None, PARAMS=params, **shared,
    )  # fmt: skip
    dweight = _sum_partials(weight_partials, weight) if params else None
    dbias = _sum_partials(bias_partials, bias) if params and bias is not None else None
    return dx.view(x.shape), dweight, dbias
