"""The elementwise middle of an MLP, `hidden = drop(f(gate) * up)` or `drop(f(up))`, and its gradients.

Backward, with g = drop(grad) under the mask of the forward pass:

    dgate = g * up * f'(gate),   dup = g * f(gate)        gated
    dup   = g * f'(up)                                    plain

Nothing is stored: f and f' come out of one device function, and backward makes hidden again beside the gradients, for the gradient of
the projection behind it. It has the same bits as the forward pass's, so both kernels are compiled without contraction of a product and
a sum, which a compiler would choose by what surrounds them.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dropout import dropout_constants, dropout_row_start, dropout_state
from .launch import accumulate_dtype, launch
from .primitives import apply_dropout, keep_mask, ptr_offset, store
from .rows import tile_grid, tile_of_program
from .tiles import elementwise_tile

_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_NORMAL_DENSITY_AT_0 = tl.constexpr(1 / math.sqrt(2 * math.pi))
# gelu_tanh(x) = x / 2 * (1 + tanh(a * x + b * x^3)) = x * sigmoid(2 * a * x + 2 * b * x^3), which needs no tanh.
_TWICE_A = tl.constexpr(2 * math.sqrt(2 / math.pi))
_TWICE_B = tl.constexpr(2 * math.sqrt(2 / math.pi) * 0.044715)


@triton.jit
def _times_sigmoid(x, z, dz):
    """`x * sigmoid(z)` and its derivative where dz = dz/dx; no exponential overflows, and 1 - sigmoid does not cancel."""
    decay = tl.exp(-tl.abs(z))
    larger = 1 / (1 + decay)
    smaller = decay * larger
    sigmoid = tl.where(z >= 0, larger, smaller)
    complement = tl.where(z >= 0, smaller, larger)
    return x * sigmoid, sigmoid * (1 + x * complement * dz)


@triton.jit
def _value_and_slope(x, POINTWISE: tl.constexpr):
    """f(x) and f'(x)."""
    if POINTWISE == "silu":
        value, slope = _times_sigmoid(x, x, 1.0)
    elif POINTWISE == "gelu":
        cdf = 0.5 * (1 + tl.math.erf(x * _SQRT_HALF))
        value, slope = x * cdf, cdf + x * tl.exp(-0.5 * x * x) * _NORMAL_DENSITY_AT_0
    elif POINTWISE == "gelu_tanh":
        value, slope = _times_sigmoid(x, x * (_TWICE_A + _TWICE_B * x * x), _TWICE_A + 3 * _TWICE_B * x * x)
    elif POINTWISE == "relu":
        value, slope = _positive(x), tl.where(x <= 0, 0.0, 1.0).to(x.dtype)
    else:
        tl.static_assert(POINTWISE == "relu2", "unknown pointwise function")
        value, slope = _positive(x) * _positive(x), 2 * _positive(x)
    return value, slope


@triton.jit
def _positive(x):
    """`max(x, 0)`; a NaN is not below zero, and passes."""
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def hidden_layer(gate, up, GATED: tl.constexpr, POINTWISE: tl.constexpr):
    """`f(gate) * up`, or `f(up)`; gate is of no meaning unless GATED."""
    if GATED:
        value, _ = _value_and_slope(gate, POINTWISE)
        hidden = value * up
    else:
        hidden, _ = _value_and_slope(up, POINTWISE)
    return hidden


@triton.jit
def differentiate(grad, gate, up, GATED: tl.constexpr, POINTWISE: tl.constexpr):
    """`(dgate, dup, hidden)` of a hidden layer's gradient; dgate is of no meaning unless GATED."""
    if GATED:
        value, slope = _value_and_slope(gate, POINTWISE)
        dgate, dup, hidden = grad * up * slope, grad * value, value * up
    else:
        hidden, slope = _value_and_slope(up, POINTWISE)
        dgate, dup = grad, grad * slope
    return dgate, dup, hidden


@triton.jit
def _activation_fwd(
    gate_ptr, up_ptr, hidden_ptr, state_ptr, num_rows, num_cols, mask_first_row, gate_strides, up_strides, hidden_strides,
    GATED: tl.constexpr, POINTWISE: tl.constexpr, HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr,
    DROPOUT_SCALE: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, first_col, mask = tile_of_program(num_rows, num_cols, BLOCK_M, BLOCK_N)
    element = (rows[:, None], (first_col + tl.arange(0, BLOCK_N))[None, :])
    up = tl.load(up_ptr + ptr_offset(element, up_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    gate = up
    if GATED:
        gate = tl.load(gate_ptr + ptr_offset(element, gate_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    hidden = hidden_layer(gate, up, GATED, POINTWISE)
    if HAS_DROPOUT:
        keep = keep_mask(state_ptr, mask_first_row + rows, first_col, num_cols, SITE, THRESHOLD, BLOCK_N)
        hidden = apply_dropout(hidden, keep, DROPOUT_SCALE)
    store(hidden_ptr + ptr_offset(element, hidden_strides), hidden, mask=mask)


@triton.jit
def _activation_bwd(
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, hidden_ptr, state_ptr, num_rows, num_cols, mask_first_row,
    grad_strides, gate_strides, up_strides, hidden_strides,
    GATED: tl.constexpr, POINTWISE: tl.constexpr, HAS_DROPOUT: tl.constexpr, SITE: tl.constexpr, THRESHOLD: tl.constexpr,
    DROPOUT_SCALE: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, first_col, mask = tile_of_program(num_rows, num_cols, BLOCK_M, BLOCK_N)
    element = (rows[:, None], (first_col + tl.arange(0, BLOCK_N))[None, :])
    grad = tl.load(grad_ptr + ptr_offset(element, grad_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    up = tl.load(up_ptr + ptr_offset(element, up_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    if HAS_DROPOUT:
        keep = keep_mask(state_ptr, mask_first_row + rows, first_col, num_cols, SITE, THRESHOLD, BLOCK_N)
        grad = apply_dropout(grad, keep, DROPOUT_SCALE)
    outputs = ptr_offset(element, hidden_strides)
    gate = up
    if GATED:
        gate = tl.load(gate_ptr + ptr_offset(element, gate_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    dgate, dup, hidden = differentiate(grad, gate, up, GATED, POINTWISE)
    if GATED:
        store(dgate_ptr + outputs, dgate, mask=mask)
    store(dup_ptr + outputs, dup, mask=mask)
    if HAS_DROPOUT:
        hidden = apply_dropout(hidden, keep, DROPOUT_SCALE)
    store(hidden_ptr + outputs, hidden, mask=mask)


def _launch_arguments(up: Tensor, gate: Tensor | None, pointwise: str, dropout):
    """What the two launches share: the grid, the integers, the constexprs."""
    num_rows, num_cols = up.shape
    tile = elementwise_tile(num_cols, up.dtype, up.device)
    grid = tile_grid(num_rows, num_cols, tile.block_m, tile.block_n)
    constexprs = {
        "GATED": gate is not None, "POINTWISE": pointwise, "ACC": accumulate_dtype(up.dtype), **dropout_constants(dropout),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "num_warps": tile.num_warps, "enable_fp_fusion": False,
    }  # fmt: skip
    return grid, (num_rows, num_cols, dropout_row_start(dropout)), constexprs


def activation_forward(
    gate: Tensor | None, up: Tensor, *, pointwise: str, dropout=None, overwrite: bool = False
) -> Tensor:
    """`drop(f(gate) * up)`, or `drop(f(up))` where gate is None, in up's dtype; rows `[N, hidden]`; in up's place with `overwrite`."""
    grid, integers, constexprs = _launch_arguments(up, gate, pointwise, dropout)
    hidden = up if overwrite else torch.empty(up.shape, dtype=up.dtype, device=up.device)
    gate_strides = None if gate is None else gate.stride()
    launch(
        _activation_fwd, grid, gate, up, hidden, dropout_state(dropout), *integers, gate_strides, up.stride(), hidden.stride(), **constexprs
    )
    return hidden


def activation_backward(
    grad: Tensor, gate: Tensor | None, up: Tensor, *, pointwise: str, dropout=None, overwrite: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    """`(dgate, dup, hidden)`, the gradients in their tensor's dtype, hidden as `activation_forward` gives it, bit for bit.

    With `overwrite` they take the places of gate, up and grad, which must be contiguous: no more memory is needed.
    """
    grid, integers, constexprs = _launch_arguments(up, gate, pointwise, dropout)
    if overwrite:
        dgate, dup, hidden = gate, up, grad
    else:
        hidden = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_strides = None if gate is None else gate.stride()
    launch(
        _activation_bwd, grid, grad, gate, up, dgate, dup, hidden, dropout_state(dropout), *integers,
        grad.stride(), gate_strides, up.stride(), hidden.stride(), **constexprs,
    )  # fmt: skip
    return dgate, dup, hidden
