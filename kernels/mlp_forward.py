"""The hidden layer of an MLP straight from its input rows: `hidden = drop(f(gate) * up)`, or `drop(f(up))` where there is no gate, with

    gate = norm(x) @ Wg.T + bg,   up = norm(x) @ Wu.T + bu

in one kernel. The walk over the rows is mlp_tile.py's; f, the mask and the bits of what comes out are those of activation.py, run on the
rounded gate and up, hence no contraction of a product and a sum here either.

Not stored: normed rows, gate and up, unless they are asked for.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import hidden_layer
from .dropout import dropout_state
from .launch import launch
from .mlp_tile import WRITTEN_COLS, Norm, gate_and_up, grouped_tile, halves, launch_arguments
from .primitives import apply_dropout, keep_mask, ptr_offset, store
from .tiles import Tile, mlp_tile


@triton.jit
def _write_hidden(
    gate, up, rows, first_col, hidden_ptr, gate_ptr, up_ptr, state_ptr, num_rows, num_cols, mask_first_row, hidden_strides,
    GATED: tl.constexpr, POINTWISE: tl.constexpr, KEEP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The hidden layer of a tile whose columns begin at `first_col`, and with KEEP its gate and up."""
    if BLOCK_N > WRITTEN_COLS:
        gate_left, gate_right = halves(gate)
        up_left, up_right = halves(up)
        _write_hidden(
            gate_left, up_left, rows, first_col, hidden_ptr, gate_ptr, up_ptr, state_ptr, num_rows, num_cols, mask_first_row,
            hidden_strides, GATED, POINTWISE, KEEP, HAS_DROPOUT, SITE, THRESHOLD, DROPOUT_SCALE, ACC, BLOCK_N // 2,
        )  # fmt: skip
        _write_hidden(
            gate_right, up_right, rows, first_col + BLOCK_N // 2, hidden_ptr, gate_ptr, up_ptr, state_ptr, num_rows, num_cols,
            mask_first_row, hidden_strides, GATED, POINTWISE, KEEP, HAS_DROPOUT, SITE, THRESHOLD, DROPOUT_SCALE, ACC, BLOCK_N // 2,
        )  # fmt: skip
        return
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    outputs = ptr_offset((rows[:, None], cols[None, :]), hidden_strides)
    if KEEP:
        tl.store(up_ptr + outputs, up, mask=mask)
        if GATED:
            tl.store(gate_ptr + outputs, gate, mask=mask)
    hidden = hidden_layer(gate.to(ACC), up.to(ACC), GATED, POINTWISE)
    if HAS_DROPOUT:
        keep = keep_mask(state_ptr, mask_first_row + rows, first_col, num_cols, SITE, THRESHOLD, BLOCK_N)
        hidden = apply_dropout(hidden, keep, DROPOUT_SCALE)
    store(hidden_ptr + outputs, hidden, mask=mask)


@triton.jit
def _mlp_fwd(
    x_ptr, stats_ptr, norm_weight_ptr, norm_bias_ptr, gate_weight_ptr, up_weight_ptr, gate_bias_ptr, up_bias_ptr,
    hidden_ptr, gate_ptr, up_ptr, state_ptr, x_strides, gate_weight_strides, up_weight_strides, hidden_strides,
    num_rows, num_cols, dim, mask_first_row,
    GATED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, POINTWISE: tl.constexpr, KEEP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows, first_col = grouped_tile(num_rows, num_cols, BLOCK_M, BLOCK_N)
    gate, up = gate_and_up(
        x_ptr, stats_ptr, norm_weight_ptr, norm_bias_ptr, gate_weight_ptr, up_weight_ptr, gate_bias_ptr, up_bias_ptr,
        rows, first_col, num_rows, num_cols, dim, x_strides, gate_weight_strides, up_weight_strides,
        GATED, NORM, OFFSET, ACC, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    _write_hidden(
        gate, up, rows, first_col, hidden_ptr, gate_ptr, up_ptr, state_ptr, num_rows, num_cols, mask_first_row, hidden_strides,
        GATED, POINTWISE, KEEP, HAS_DROPOUT, SITE, THRESHOLD, DROPOUT_SCALE, ACC, BLOCK_N,
    )  # fmt: skip


def mlp_forward(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, *, b_gate: Tensor | None = None, b_up: Tensor | None = None,
    norm: Norm | None = None, stats: Tensor | None = None, pointwise: str, dropout=None, keep: bool = False, tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`(hidden, gate, up)`, each `[N, hidden]` in w_up's dtype, of rows `x [N, dim]`; gate and up are None unless `keep`.

    Weights are `[hidden, dim]`, biases `[hidden]`; w_gate is None in a plain MLP, and so is its output. `norm` needs `stats`, the rows'
    statistics as `norm_stats` makes them.
    """
    tile = tile or mlp_tile(w_up.dtype, x.device)
    shared = launch_arguments(x, w_gate, w_up, b_gate, b_up, norm, stats, pointwise, dropout, tile)
    shape = x.size(0), w_up.size(0)
    hidden = torch.empty(shape, dtype=w_up.dtype, device=x.device)
    up = torch.empty(shape, dtype=w_up.dtype, device=x.device) if keep else None
    gate = torch.empty(shape, dtype=w_up.dtype, device=x.device) if keep and w_gate is not None else None
    launch(
        _mlp_fwd, shared.grid, *shared.inputs, hidden, gate, up, dropout_state(dropout), *shared.strides, hidden.stride(), *shared.integers,
        KEEP=keep, **shared.constexprs,
    )  # fmt: skip
    return hidden, gate, up
