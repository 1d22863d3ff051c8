"""Rotary position embedding (arXiv:2104.09864) of heads, the two halves of the rotated part against each other.

    first'  = first * cos - second * sin
    second' = second * cos + first * sin

for the leading R = 2 * cos.shape[-1] elements of a head; elements beyond R are copied. The rotation is orthogonal, so its gradient is
the rotation by the negative angle: nothing of x is stored. Angles that all batch entries share have stride 0 along the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import accumulate_dtype, launch
from .primitives import ptr_offset, store
from .tiles import rope_tile


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, heads, length, head_dim, half, x_strides, cos_strides, sin_strides, out_strides,
    INVERSE: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # A row is one head of one token, heads running fastest: so they lie in memory behind a projection, and in the output.
    row_blocks = tl.cdiv(length * heads, BLOCK_M)
    batch = tl.program_id(0) // row_blocks
    rows = tl.program_id(0) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = (rows < length * heads)[:, None]
    head, position = (rows % heads)[:, None], (rows // heads)[:, None]

    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = in_rows & (cols < half)
    cos = tl.load(cos_ptr + ptr_offset((batch, position, cols), cos_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    sin = tl.load(sin_ptr + ptr_offset((batch, position, cols), sin_strides), mask=mask, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    if INVERSE:
        sin = -sin
    first = tl.load(x_ptr + ptr_offset((batch, head, position, cols), x_strides), mask=mask, other=0.0).to(ACC)
    second = tl.load(x_ptr + ptr_offset((batch, head, position, half + cols), x_strides), mask=mask, other=0.0).to(ACC)
    store(out_ptr + ptr_offset((batch, head, position, cols), out_strides), first * cos - second * sin, mask=mask)
    store(out_ptr + ptr_offset((batch, head, position, half + cols), out_strides), second * cos + first * sin, mask=mask)

    for first_col in range(2 * half, head_dim, BLOCK_N):
        cols = first_col + tl.arange(0, BLOCK_N)[None, :]
        mask = in_rows & (cols < head_dim)
        rest = tl.load(x_ptr + ptr_offset((batch, head, position, cols), x_strides), mask=mask, other=0.0).to(ACC)
        store(out_ptr + ptr_offset((batch, head, position, cols), out_strides), rest, mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """`x [B, H, T, D]` rotated by the angles of `cos`, `sin`, or back where `inverse`; it lies in memory as `[B, T, H, D]`.

    They are `[T, R / 2]`, or `[B or 1, T, R / 2]` where batch entries have angles of their own, of any strides and floating dtype.
    """
    batch, heads, length, head_dim = x.shape
    half = cos.shape[-1]
    cos, sin = cos.expand(batch, length, half), sin.expand(batch, length, half)
    out = torch.empty((batch, length, heads, head_dim), dtype=x.dtype, device=x.device).transpose(1, 2)
    tile = rope_tile(half, x.dtype, x.device)
    programs = batch * triton.cdiv(length * heads, tile.block_m)
    launch(
        _rotate, (programs,), x, cos, sin, out, heads, length, head_dim, half, x.stride(), cos.stride(), sin.stride(), out.stride(),
        INVERSE=inverse, ACC=accumulate_dtype(x.dtype), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
    )  # fmt: skip
    return out
