"""Tile sizes: one frozen table per kernel family, chosen by shape and architecture, never tuned at run time.

A replay must repeat the arithmetic of the forward pass bit for bit, so no measurement may pick another tile between the two.
"""

from dataclasses import dataclass, replace

import torch
import triton

from .architecture import AMD, architecture
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
# A row's key is (bytes of an element, widest head), and "bounded" where a window or documents cut a walk short at both ends, which takes
# registers: a loop more, and masks in two of three; "bounded dropout" where the rules in `_attention_tile` do not go far enough. The rows
# of "" serve every architecture that has none of its own. Nothing of 2 bytes spills, and all fits the shared memory of a program;
# `python -m bench.aot` holds both and prints registers and memory of each row.
# Wide tiles of block_m are what spares the L2 cache: the bytes read for a product fall with it.
# float32 and float64 have no fast matrix product to feed and their operands fill registers, so there small tiles are as good as any.
# Some of their binaries spill 8 to 24 bytes, where the assembler saves registers for more warps than a program has. float64 at 256
# dimensions spills even in the least tile there is, and its backward does not fit the 99 KiB of sm_86 and sm_120.

_Table = dict[str, dict[tuple[int, int] | tuple[int, int, str], Tile]]

_ATTENTION_FORWARD: _Table = {
    # For sm_86 and sm_120, whose programs have 99 KiB: two stages of keys and values, and up to 240 registers.
    "": {
        (2, 64): Tile(128, 64, num_warps=8, num_stages=2),
        (2, 128): Tile(128, 64, num_warps=8, num_stages=2),
        (2, 256): Tile(64, 32, num_warps=8, num_stages=2),
        (4, 64): Tile(32, 32, num_warps=4, num_stages=2),
        (4, 128): Tile(32, 16, num_warps=8, num_stages=2),
        (4, 256): Tile(16, 16, num_warps=8, num_stages=2),
        (8, 64): Tile(32, 16, num_warps=4, num_stages=2),
        (8, 128): Tile(16, 16, num_warps=4, num_stages=1),
        (8, 256): Tile(16, 16, num_warps=8, num_stages=1),
    },
    # Registers leave room for one program a multiprocessor, so a third stage costs none of its 163 KiB that another would use; at 128
    # dimensions its addresses would spill under dropout.
    "sm_80": {
        (2, 64): Tile(128, 64, num_warps=8, num_stages=3),
        (2, 128): Tile(128, 64, num_warps=8, num_stages=2),
    },
    # Twice the columns spill here, though not on sm_86, where a head is no power of two wide.
    "sm_120": {(2, 128): Tile(128, 32, num_warps=8, num_stages=2)},
    # A group of four warps multiplies 64 rows by all columns at once, keys and values from shared memory, which holds three stages. Twice
    # the columns would spill as soon as a window, documents or a softcap join in.
    "sm_90": {
        (2, 64): Tile(128, 64, num_warps=8, num_stages=3),
        (2, 128): Tile(128, 64, num_warps=8, num_stages=3),
        (2, 256): Tile(128, 32, num_warps=8, num_stages=2),
    },
    # Sums stand in tensor memory, of which 128 rows and 512 columns are all there is, and not in registers.
    "sm_100": {
        (2, 64): Tile(128, 128, num_warps=8, num_stages=2),
        (2, 128): Tile(128, 64, num_warps=8, num_stages=2),
        (2, 256): Tile(64, 32, num_warps=8, num_stages=2),
    },
    # Four warps of 64 lanes may have 512 registers each, eight but 256. One stage: AMD's compiler gains nothing from more where two
    # products follow each other, and 64 KiB would not hold them.
    "gfx942": {
        (2, 64): Tile(128, 64, num_warps=4, num_stages=1),
        (2, 128): Tile(128, 64, num_warps=4, num_stages=1),
        (2, 256): Tile(64, 32, num_warps=4, num_stages=1),
    },
}
# Backward keeps two sums a program, of dk and dv, where forward keeps one, hence its smaller tiles.
_ATTENTION_BACKWARD: _Table = {
    "": {
        (2, 64): Tile(128, 32, num_warps=8, num_stages=2),
        (2, 64, "bounded"): Tile(64, 32, num_warps=8, num_stages=2),
        (2, 64, "bounded dropout"): Tile(32, 16, num_warps=4, num_stages=2),
        (2, 128): Tile(64, 32, num_warps=8, num_stages=2),
        (2, 128, "bounded"): Tile(32, 32, num_warps=8, num_stages=2),
        (2, 256): Tile(32, 32, num_warps=8, num_stages=2),
        (4, 64): Tile(16, 16, num_warps=4, num_stages=2),
        (4, 128): Tile(16, 16, num_warps=4, num_stages=2),
        (4, 256): Tile(16, 16, num_warps=8, num_stages=1),
        (8, 64): Tile(16, 16, num_warps=4, num_stages=1),
        (8, 128): Tile(16, 16, num_warps=4, num_stages=1),
        (8, 256): Tile(16, 16, num_warps=8, num_stages=1),
    },
    "sm_90": {
        (2, 128): Tile(64, 32, num_warps=8, num_stages=2),
        (2, 128, "bounded"): Tile(32, 32, num_warps=8, num_stages=1),  # the addresses of a second stage would spill under dropout
        (2, 256): Tile(32, 32, num_warps=8, num_stages=1),
        (2, 256, "bounded"): Tile(32, 16, num_warps=8, num_stages=1),  # 32 keys would spill under a softcap
    },
    # Both sums fill tensor memory and pass through registers. The addresses of a second stage would spill.
    "sm_100": {
        (2, 64): Tile(128, 32, num_warps=8, num_stages=1),
        (2, 128): Tile(128, 32, num_warps=8, num_stages=1),
        (2, 256): Tile(32, 32, num_warps=8, num_stages=2),
        (2, 256, "bounded"): Tile(32, 32, num_warps=4, num_stages=1),  # eight warps would spill under a softcap
    },
    "gfx942": {
        (2, 64): Tile(64, 32, num_warps=4, num_stages=1),
        (2, 128): Tile(64, 32, num_warps=4, num_stages=1),
        (2, 256): Tile(32, 16, num_warps=4, num_stages=1),
        (4, 256): Tile(16, 16, num_warps=4, num_stages=1),
        (8, 256): Tile(16, 16, num_warps=4, num_stages=1),
    },
}


def _attention_tile(
    table: _Table, head_dim: int, dtype: torch.dtype, device: torch.device, dropout: bool, bounded: bool, extras: int
) -> Tile:
    if INTERPRETED:
        return INTERPRETER_TILE
    width = next(width for width in (64, 128, 256) if head_dim <= width)
    row = dtype.itemsize, width
    rows = table.get(architecture(device), {})
    if row not in rows:
        rows = table[""]
    tile = rows[row]
    if bounded:
        tile = rows.get((*row, "bounded"), tile)
        if dropout and (own := rows.get((*row, "bounded dropout"))) is not None:
            return own
    # The random words of a tile take as many registers as its scores; so does masking where a head is no power of two wide.
    narrow = dropout or head_dim != triton.next_power_of_2(head_dim)
    # Three of a window or documents, a dense mask, a softcap and dropout together are rare, and take as many again.
    for _ in range(narrow + (bounded + dropout + extras > 2)):
        tile = replace(tile, block_n=tile.block_n // 2) if tile.block_n > 16 else replace(tile, block_m=max(16, tile.block_m // 2))
    return tile


def attention_forward_tile(
    head_dim: int, dtype: torch.dtype, device: torch.device, *, dropout: bool, bounded: bool, extras: int = 0
) -> Tile:
    """Tile of the attention forward kernel.

    `bounded` where a window or documents bound what a query sees at both ends; `extras` counts a dense mask and a softcap.
    """
    return _attention_tile(_ATTENTION_FORWARD, head_dim, dtype, device, dropout, bounded, extras)


def attention_backward_tile(
    head_dim: int, dtype: torch.dtype, device: torch.device, *, dropout: bool, bounded: bool, extras: int = 0
) -> Tile:
    """Tile of both attention backward kernels; arguments as in forward."""
    tile = _attention_tile(_ATTENTION_BACKWARD, head_dim, dtype, device, dropout, bounded, extras)
    # Here a softcap keeps its tangents beside the scores, and a dense mask its addresses: either spills on some card.
    return replace(tile, block_n=max(16, tile.block_n // 2)) if extras and not INTERPRETED else tile


# --- norms, rotary embedding, elementwise ---
# Bound by memory: a lane holds 8 to 16 elements of a tensor, so that its loads are 16 bytes wide and several are under way. No architecture
# asks for another size; AMD's warps have twice the lanes, hence half the warps.

# Widest row that a norm keeps in registers: forward holds x alone, backward x, its gradient, and the two sums over rows.
_NORM_FORWARD_WIDTH = 32768
_NORM_BACKWARD_WIDTH = 8192
# The partial sums of a norm's backward are spread over 1024 lanes of each processor of the largest card of an architecture, and over so
# many tiles of rows a program at the least, lest there be more partial sums than rows.
_PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}
_NORM_BACKWARD_STEPS = 8


def _lanes(device: torch.device) -> int:
    """Threads of a warp."""
    return 64 if architecture(device) in AMD else 32


def _row_tile(cols: int, widest: int, elements: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """A tile of `elements` or, where one row is wider, of one row up to `widest`; float64 takes two registers, hence half of that."""
    if INTERPRETED:
        return INTERPRETER_ROW_TILE
    if dtype.itemsize == 8:
        widest, elements = widest // 2, elements // 2
    # Four neighbours share a Philox call, so a mask has no narrower tile.
    block_n = min(max(triton.next_power_of_2(cols), 4), widest)
    block_m = max(1, elements // block_n)
    return Tile(block_m, block_n, num_warps=min(16, block_m * block_n // (16 * _lanes(device))))


def norm_tile(cols: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of a norm's forward kernels."""
    return _row_tile(cols, _NORM_FORWARD_WIDTH, 2048, dtype, device)


def norm_backward_tile(cols: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of a norm's backward kernels."""
    return _row_tile(cols, _NORM_BACKWARD_WIDTH, 2048, dtype, device)


def norm_backward_programs(row_blocks: int, col_blocks: int, tile: Tile, device: torch.device) -> int:
    """Programs that share the rows of a norm's backward: each writes one partial sum of the weight's gradient."""
    if INTERPRETED:
        return min(row_blocks, 3)
    warps = _PROCESSORS[architecture(device)] * 1024 // _lanes(device)
    most = max(1, warps // (tile.num_warps * max(1, col_blocks)))
    return min(triton.cdiv(row_blocks, _NORM_BACKWARD_STEPS), most)


def column_sum_tile(device: torch.device) -> Tile:
    """Tile of the sum over a norm's partial sums: narrow, since there is one row of programs only."""
    return INTERPRETER_TILE if INTERPRETED else Tile(32, 32)


def rope_tile(half: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of the rotary embedding: heads of tokens by the pairs of a head, all in one tile."""
    # The elements that are not rotated are copied in steps of block_n, hence not one by one where few are rotated.
    block_n = max(16, triton.next_power_of_2(half))
    if INTERPRETED:
        return Tile(16, block_n)
    return Tile(max(1, 1024 // block_n), block_n, num_warps=1024 // (8 * _lanes(device)))


def elementwise_tile(cols: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of activations, dropout and residual sums."""
    return _row_tile(cols, 1024, 2048, dtype, device)


# --- fused MLP ---
# block_m counts rows, block_n columns of the hidden layer, of which a gated MLP sums two products, block_k the depth of a step. The keys
# are bytes of an element. One tile serves forward and backward, so that both add up in one order and their hidden layers have the same
# bits. Rows are normalised once for each tile of columns, hence wide tiles where registers allow.

_MLP: dict[str, dict[int, Tile]] = {
    # Two sums of 128 columns and their operands are more registers than a thread has where matrix units work on registers alone: it spills.
    # Steps of 32 need no more than 140 registers, where those of 64 spill under some activations. float32 runs on ordinary units, which 64
    # columns keep as busy.
    "": {
        2: Tile(128, 64, 32, num_warps=8, num_stages=4),
        4: Tile(64, 64, 16, num_warps=8, num_stages=2),
        8: Tile(32, 32, 16, num_warps=4, num_stages=2),
    },
    # Matrix units read the weights from shared memory. Steps twice as deep spill in backward: rows are normalised in registers.
    "sm_90": {2: Tile(128, 128, 32, num_warps=8, num_stages=4)},
    # The sums stand in tensor memory.
    "sm_100": {2: Tile(128, 128, 64, num_warps=8, num_stages=3)},
    # There are 64 KiB of shared memory: half of it, in steps half as deep, leaves room for a second program.
    "gfx942": {2: Tile(128, 128, 32, num_warps=8, num_stages=2)},
}


def mlp_tile(dtype: torch.dtype, device: torch.device) -> Tile:
    """Tile of both fused MLP kernels."""
    if INTERPRETED:
        return INTERPRETER_TILE
    return _MLP.get(architecture(device), {}).get(dtype.itemsize) or _MLP[""][dtype.itemsize]


# Widest rows for which the fused kernels should beat a library's products with elementwise kernels around them. Modelled, not measured:
# in a forward pass and its replay, separate kernels write and read gate and up twice (8 * hidden elements a row), and forward does so with
# the normed rows (2 * dim); the products, 8 * dim * hidden operations a row, run at an assumed 0.70 of the peak when fused, at an assumed
# 0.85 in a library. A plain MLP has half of either. With W = 2 bytes / (1 / 0.70 - 1 / 0.85) * peak / bandwidth, fused wins where
#
#     dim <= W * (1 + dim / (4 * hidden))
#
# The table has W, from datasheets' peaks in bfloat16 with float32 sums (TFLOP/s) and bandwidths (TB/s).
_FUSED_MLP_WIDEST = {
    "sm_80": 1214,  # A100: 312, 2.04
    "sm_86": 601,  # RTX 3090: 71, 0.936
    "sm_90": 1634,  # H200: 989, 4.8; an H100 with its 3.35 would fuse up to 2342, but it is not told apart
    "sm_100": 2231,  # B200: 2250, 8.0
    "sm_120": 927,  # RTX 5090: 209.5, 1.79
    "gfx942": 1956,  # MI300X: 1307, 5.3
}


def fused_mlp(dim: int, hidden: int, dtype: torch.dtype, device: torch.device, *, force: bool = False) -> bool:
    """Whether rows `[N, dim]` become a hidden layer in one kernel, or by a library's matrix product and elementwise kernels.

    It depends on shape and architecture alone, so a replay goes the way of the forward pass. Never in float32 and float64, whose products
    take too long for the bytes to matter, nor on a CPU, where `force` lets Triton's interpreter do it.
    """
    if device.type == "cpu" or dtype.itemsize != 2:
        return force
    return force or dim <= _FUSED_MLP_WIDEST[architecture(device)] * (1 + dim / (4 * hidden))
