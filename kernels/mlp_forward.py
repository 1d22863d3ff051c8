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

from .activation import value_and_slope
from .dropout import dropout_state
from .launch import launch
from .mlp_tile import Norm, gate_and_up, grouped_tile, launch_arguments
from .primitives import apply_dropout, keep_mask, ptr_offset, store
from .tiles import Tile, mlp_tile


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
    cols = first_col + tl.arange(0, BLOCK_N)
    gate, up = gate_and_up(
        x_ptr, stats_ptr, norm_weight_ptr, norm_bias_ptr, gate_weight_ptr, up_weight_ptr, gate_bias_ptr, up_bias_ptr,
        rows, cols, num_rows, num_cols, dim, x_strides, gate_weight_strides, up_weight_strides,
        GATED, NORM, OFFSET, ACC, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    outputs = ptr_offset((rows[:, None], cols[None, :]), hidden_strides)
    if KEEP:
        store(up_ptr + outputs, up, mask=mask)
    if GATED:
        if KEEP:
            store(gate_ptr + outputs, gate, mask=mask)
        value, _ = value_and_slope(gate, POINTWISE)
        hidden = value * up
    else:
        hidden, _ = value_and_slope(up, POINTWISE)
    if HAS_DROPOUT:
        keep = keep_mask(state_ptr, mask_first_row + rows, first_col, num_cols, SITE, THRESHOLD, BLOCK_N)
        hidden = apply_dropout(hidden, keep, DROPOUT_SCALE)
    store(hidden_ptr + outputs, hidden, mask=mask)


def mlp_forward(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, *, b_gate: Tensor | None = None, b_up: Tensor | None = None,
    norm: Norm | None = None, stats: Tensor | None = None, pointwise: str, dropout=None, keep: bool = False, tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`(hidden, gate, up)`, each `[N, hidden]` in w_up's dtype, of rows `x [N, dim]`; gate and up are None unless `keep`.

    Weights are `[hidden, dim]`, biases `[hidden]`; w_gate is None in a plain MLP, and so is its output. `norm` needs `stats`, the rows'
    statistics as `norm_stats` makes them.
    """
    tile = tile or mlp_tile(w_up.dtype, x.device, dropout=dropout is not None)
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
