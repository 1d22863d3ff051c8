"""Tile sizes: one frozen table per kernel family, chosen by shape and architecture, never tuned at run time.

A replay must repeat the arithmetic of the forward pass bit for bit, so no measurement may pick another tile between the two.
"""

from dataclasses import dataclass, replace

import torch
import triton

from .launch import INTERPRETED


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and reduction depth of a program's tile, its warps and its software-pipeline stages."""

    block_m: int
    block_n: int
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 2


# Programs of the interpreter cost by the operation, not by the element; 16 is the least that a matrix product of a GPU takes,
# and keeps several tiles in play at the lengths that tests can afford.
INTERPRETER_TILE = Tile(16, 16, 16)
INTERPRETER_ROW_TILE = Tile(16, 64)


# --- attention ---
# block_m counts the rows that a program keeps, block_n those that it walks over: queries and keys, and for dk and dv keys and queries.
# The keys are (bytes of an element, widest head). Sizes are the largest at which neither sm_80 nor sm_90 spills (`bench/aot.py`) and
# shared memory fits 99 KiB up to 128 dimensions. Backward keeps two sums a program where forward keeps one, hence its smaller tiles;
# float32 and float64 have no fast matrix product to feed, and their operands fill registers.

_ATTENTION_FORWARD = {
    (2, 64): Tile(128, 64, num_warps=8, num_stages=2),
    (2, 128): Tile(128, 64, num_warps=8, num_stages=2),
    (2, 256): Tile(64, 32, num_warps=8, num_stages=2),
    (4, 64): Tile(32, 32, num_warps=4, num_stages=2),
    (4, 128): Tile(32, 16, num_warps=8, num_stages=2),
    (4, 256): Tile(16, 16, num_warps=8, num_stages=2),
    (8, 64): Tile(32, 16, num_warps=4, num_stages=2),
    (8, 128): Tile(16, 16, num_warps=4, num_stages=1),
    (8, 256): Tile(16, 16, num_warps=8, num_stages=1),
}
_ATTENTION_BACKWARD = {
    (2, 64): Tile(128, 32, num_warps=8, num_stages=2),
    (2, 128): Tile(64, 32, num_warps=8, num_stages=2),
    (2, 256): Tile(32, 32, num_warps=8, num_stages=1),
    (4, 64): Tile(16, 32, num_warps=4, num_stages=2),
    (4, 128): Tile(16, 16, num_warps=4, num_stages=2),
    (4, 256): Tile(16, 16, num_warps=8, num_stages=1),
    (8, 64): Tile(16, 16, num_warps=4, num_stages=1),
    (8, 128): Tile(16, 16, num_warps=4, num_stages=1),
    (8, 256): Tile(16, 16, num_warps=8, num_stages=1),
}


def _attention_tile(table: dict[tuple[int, int], Tile], head_dim: int, dtype: torch.dtype, device: torch.device, dropout: bool) -> Tile:
    if INTERPRETED:
        return INTERPRETER_TILE
    width = next(width for width in (64, 128, 256) if head_dim <= width)
    tile = table[dtype.itemsize, width]
    # The random words of a tile take as many registers as its scores; so does masking where a head is no power of two wide.
    crowded = dropout or head_dim != triton.next_power_of_2(head_dim)
    return replace(tile, block_n=max(16, tile.block_n // 2)) if crowded else tile


def attention_forward_tile(head_dim: int, dtype: torch.dtype, device: torch.device, *, dropout: bool) -> Tile:
    """Tile of the attention forward kernel."""
    return _attention_tile(_ATTENTION_FORWARD, head_dim, dtype, device, dropout)


def attention_backward_tile(head_dim: int, dtype: torch.dtype, device: torch.device, *, dropout: bool) -> Tile:
    """Tile of both attention backward kernels."""
    return _attention_tile(_ATTENTION_BACKWARD, head_dim, dtype, device, dropout)


# --- norms, rotary embedding, elementwise ---
# Bound by memory: a thread holds 8 to 16 elements of a tensor, so that its loads are 16 bytes wide and several are under way.

# Widest row that a norm keeps in registers: forward holds x alone, backward x, its gradient, and the two sums over rows.
_NORM_FORWARD_WIDTH = 32768
_NORM_BACKWARD_WIDTH = 8192
# Warps that the partial sums of a norm's backward are spread over, about 30 on each of 132 processors, and the tiles of rows that a
# program takes at the least, lest there be more partial sums than rows.
_NORM_BACKWARD_WARPS = 4096
_NORM_BACKWARD_STEPS = 8


def _row_tile(cols: int, widest: int, elements: int) -> Tile:
    """A tile of `elements` or, where one row is wider, of one row up to `widest`."""
    if INTERPRETED:
        return INTERPRETER_ROW_TILE
    # Four neighbours share a Philox call, so a mask has no narrower tile.
    block_n = min(max(triton.next_power_of_2(cols), 4), widest)
    block_m = max(1, elements // block_n)
    return Tile(block_m, block_n, num_warps=min(16, block_m * block_n // 512))


def norm_tile(cols: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of a norm's forward kernels."""
    return _row_tile(cols, _NORM_FORWARD_WIDTH, 2048)


def norm_backward_tile(cols: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of a norm's backward kernels."""
    return _row_tile(cols, _NORM_BACKWARD_WIDTH, 2048)


def norm_backward_programs(row_blocks: int, col_blocks: int, tile: Tile, device: torch.device) -> int:
    """Programs that share the rows of a norm's backward: each writes one partial sum of the weight's gradient."""
    if INTERPRETED:
        return min(row_blocks, 3)
    most = max(1, _NORM_BACKWARD_WARPS // (tile.num_warps * max(1, col_blocks)))
    return min(triton.cdiv(row_blocks, _NORM_BACKWARD_STEPS), most)


def column_sum_tile(device: torch.device) -> Tile:
    """Tile of the sum over a norm's partial sums: narrow, since there is one row of programs only."""
    return INTERPRETER_TILE if INTERPRETED else Tile(32, 32)


def rope_tile(half: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of the rotary embedding: heads of tokens by the pairs of a head, all in one tile."""
    # The elements that are not rotated are copied in steps of block_n, hence not one by one where few are rotated.
    block_n = max(16, triton.next_power_of_2(half))
    return Tile(16, block_n) if INTERPRETED else Tile(max(1, 1024 // block_n), block_n)


def elementwise_tile(cols: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of activations, dropout and residual sums."""
    return _row_tile(cols, 1024, 2048)


# --- fused MLP ---


def mlp_tile(dtype: torch.dtype, device: torch.device, *, dropout: bool) -> Tile:
    """Tile of both fused MLP kernels."""
    return INTERPRETER_TILE if INTERPRETED else Tile(128, 64, 64, num_warps=8, num_stages=3)
