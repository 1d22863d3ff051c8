"""From the gradient of an MLP's hidden layer to those of gate and up, which are made again on the way, like the hidden layer itself.

The walk over the rows is the one of mlp_forward.py, so gate and up have its bits; the formulas are in activation.py's header. dgate and
dup are what `activation_backward` makes of the gate and up that the forward kernel stores when asked to, and hidden is the forward
pass's, bit for bit.

Not stored: normed rows, gate, up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import differentiate
from .dropout import dropout_state
from .launch import launch
from .mlp_tile import WRITTEN_COLS, Norm, gate_and_up, grouped_tile, halves, launch_arguments
from .primitives import apply_dropout, keep_mask, ptr_offset, store
from .tiles import Tile, mlp_tile


@triton.jit
def _write_gradients(
    gate, up, rows, first_col, grad_ptr, dgate_ptr, dup_ptr, hidden_ptr, state_ptr, num_rows, num_cols, mask_first_row,
    grad_strides, hidden_strides, GATED: tl.constexpr, POINTWISE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile whose columns begin at `first_col`, and its hidden layer."""
    if BLOCK_N > WRITTEN_COLS:
        gate_left, gate_right = halves(gate)
        up_left, up_right = halves(up)
        _write_gradients(
            gate_left, up_left, rows, first_col, grad_ptr, dgate_ptr, dup_ptr, hidden_ptr, state_ptr, num_rows, num_cols, mask_first_row,
            grad_strides, hidden_strides, GATED, POINTWISE, HAS_DROPOUT, SITE, THRESHOLD, DROPOUT_SCALE, ACC, BLOCK_N // 2,
        )  # fmt: skip
        _write_gradients(
            gate_right, up_right, rows, first_col + BLOCK_N // 2, grad_ptr, dgate_ptr, dup_ptr, hidden_ptr, state_ptr, num_rows, num_cols,
            mask_first_row, grad_strides, hidden_strides, GATED, POINTWISE, HAS_DROPOUT, SITE, THRESHOLD, DROPOUT_SCALE, ACC, BLOCK_N // 2,
        )  # fmt: skip
        return
    cols = first_col + tl.arange(0, BLOCK_N)
    element = (rows[:, None], cols[None, :])
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    outputs = ptr_offset(element, hidden_strides)
    grad = tl.load(grad_ptr + ptr_offset(element, grad_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    if HAS_DROPOUT:
        keep = keep_mask(state_ptr, mask_first_row + rows, first_col, num_cols, SITE, THRESHOLD, BLOCK_N)
        grad = apply_dropout(grad, keep, DROPOUT_SCALE)
    dgate, dup, hidden = differentiate(grad, gate.to(ACC), up.to(ACC), GATED, POINTWISE)
    if GATED:
        store(dgate_ptr + outputs, dgate, mask=mask)
    store(dup_ptr + outputs, dup, mask=mask)
    if HAS_DROPOUT:
        hidden = apply_dropout(hidden, keep, DROPOUT_SCALE)
    store(hidden_ptr + outputs, hidden, mask=mask)


@triton.jit
def _mlp_bwd(
    x_ptr, stats_ptr, norm_weight_ptr, norm_bias_ptr, gate_weight_ptr, up_weight_ptr, gate_bias_ptr, up_bias_ptr,
    grad_ptr, dgate_ptr, dup_ptr, hidden_ptr, state_ptr, x_strides, gate_weight_strides, up_weight_strides, grad_strides, hidden_strides,
    num_rows, num_cols, dim, mask_first_row,
    GATED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, POINTWISE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows, first_col = grouped_tile(num_rows, num_cols, BLOCK_M, BLOCK_N)
    gate, up = gate_and_up(
        x_ptr, stats_ptr, norm_weight_ptr, norm_bias_ptr, gate_weight_ptr, up_weight_ptr, gate_bias_ptr, up_bias_ptr,
        rows, first_col, num_rows, num_cols, dim, x_strides, gate_weight_strides, up_weight_strides,
        GATED, NORM, OFFSET, ACC, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    _write_gradients(
        gate, up, rows, first_col, grad_ptr, dgate_ptr, dup_ptr, hidden_ptr, state_ptr, num_rows, num_cols, mask_first_row,
        grad_strides, hidden_strides, GATED, POINTWISE, HAS_DROPOUT, SITE, THRESHOLD, DROPOUT_SCALE, ACC, BLOCK_N,
    )  # fmt: skip


def mlp_backward(
    grad: Tensor, x: Tensor, w_gate: Tensor | None, w_up: Tensor, *, b_gate: Tensor | None = None, b_up: Tensor | None = None,
    norm: Norm | None = None, stats: Tensor | None = None, pointwise: str, dropout=None, overwrite: bool = False, tile: Tile | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """`(dgate, dup, hidden)` in w_up's dtype, of `grad [N, hidden]` and the arguments of `mlp_forward`; dgate is None in a plain MLP.

    With `overwrite` hidden takes the place of grad, which must be contiguous and of w_up's dtype.
    """
    tile = tile or mlp_tile(w_up.dtype, x.device)
    shared = launch_arguments(x, w_gate, w_up, b_gate, b_up, norm, stats, pointwise, dropout, tile)
    shape = x.size(0), w_up.size(0)
    hidden = grad if overwrite else torch.empty(shape, dtype=w_up.dtype, device=x.device)
    dup = torch.empty(shape, dtype=w_up.dtype, device=x.device)
    dgate = None if w_gate is None else torch.empty(shape, dtype=w_up.dtype, device=x.device)
    launch(
        _mlp_bwd, shared.grid, *shared.inputs, grad, dgate, dup, hidden, dropout_state(dropout),
        *shared.strides, grad.stride(), hidden.stride(), *shared.integers, **shared.constexprs,
    )  # fmt: skip
    return dgate, dup, hidden
