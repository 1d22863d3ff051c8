"""Tensors as matrices of rows."""

import math

import triton
import triton.language as tl
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """`x [..., C]` as `[N, C]`: a view wherever the strides allow one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@triton.jit
def tile_of_program(num_rows, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows, first column and mask of this program's tile of a matrix, whose tiles are counted along its rows."""
    col_blocks = tl.cdiv(num_cols, BLOCK_N)
    rows = tl.program_id(0) // col_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = tl.program_id(0) % col_blocks * BLOCK_N
    mask = (rows < num_rows)[:, None] & (first_col + tl.arange(0, BLOCK_N) < num_cols)[None, :]
    return rows, first_col, mask


def tile_grid(num_rows: int, num_cols: int, block_m: int, block_n: int) -> tuple[int]:
    """The grid of `tile_of_program`."""
    return (triton.cdiv(num_rows, block_m) * triton.cdiv(num_cols, block_n),)
