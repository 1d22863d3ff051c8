"""Device functions that the kernels share: addressing, matrix products, dropout masks."""

import triton
import triton.language as tl

from .launch import INTERPRETED

# Triton's interpreter cuts float32 off to bfloat16 where a GPU rounds.
_TRUNCATES_BF16 = tl.constexpr(INTERPRETED)


@triton.jit
def ptr_offset(indices, strides):
    """Element offset of `indices` under `strides` (two tuples of one length), in 64 bits so that it cannot wrap."""
    offset = tl.cast(indices[0], tl.int64) * strides[0]
    for axis in tl.static_range(1, len(strides)):
        offset += tl.cast(indices[axis], tl.int64) * strides[axis]
    return offset


@triton.jit
def nearest(values, DTYPE: tl.constexpr):
    """`values` as DTYPE, rounded to nearest even."""
    if _TRUNCATES_BF16 and DTYPE == tl.bfloat16:
        wide = values.to(tl.float32)
        bits = wide.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        values = tl.where(wide == wide, rounded, wide)  # adding to a NaN's bits could make it a number
    return values.to(DTYPE)


@triton.jit
def store(pointers, values, mask):
    """Write `values` in the dtype that is pointed to, rounded to nearest even."""
    tl.store(pointers, nearest(values, pointers.dtype.element_ty), mask=mask)


@triton.jit
def head_start(ptr, batch, head, strides):
    """Where one head of a `[B, H, T, D]` tensor begins."""
    return ptr + ptr_offset((batch, head), (strides[0], strides[1]))


@triton.jit
def load_rows(head_ptr, strides, rows, row_count, dims, HEAD_DIM: tl.constexpr):
    """`[len(rows), len(dims)]` of a head of a `[B, H, T, D]` tensor; zero for rows from `row_count` and dimensions from HEAD_DIM on."""
    pointers = head_ptr + ptr_offset((rows[:, None], dims[None, :]), (strides[2], strides[3]))
    return tl.load(pointers, mask=(rows < row_count)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(head_ptr, strides, rows, row_count, dims, values, HEAD_DIM: tl.constexpr):
    """Write what `load_rows` would read, in the tensor's dtype."""
    pointers = head_ptr + ptr_offset((rows[:, None], dims[None, :]), (strides[2], strides[3]))
    store(pointers, values, mask=(rows < row_count)[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def dot(a, b, accumulator, OPERAND: tl.constexpr):
    """`accumulator + a @ b` with operands read as OPERAND; float32 is multiplied as float32, never as TF32."""
    return tl.dot(a.to(OPERAND), b.to(OPERAND), accumulator, input_precision="ieee", out_dtype=accumulator.dtype)


@triton.jit
def tanh(x):
    """Right to a few units in the last place of float32 and float64, also near 0, where 1 - exp(-2 |x|) cancels.

    There it is Lambert's continued fraction for tanh, seven levels deep, hence with coefficients that are whole numbers.
    """
    size = tl.abs(x)
    small = tl.minimum(size, 0.5)
    square = small * small
    fade = tl.exp(-2 * size)
    numerator = tl.where(size < 0.5, small * (135135 + square * (17325 + square * (378 + square))), 1 - fade)
    denominator = tl.where(size < 0.5, 135135 + square * (62370 + square * (3150 + square * 28)), 1 + fade)
    return tl.where(x < 0, -numerator, numerator) / denominator


@triton.jit
def keep_mask(state_ptr, rows, first_col, cols, SITE: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of a tile survive dropout: `[len(rows), BLOCK_N]`, columns from `first_col` (a multiple of 4) on.

    One Philox4x32-10 call serves four neighbouring columns of a row of `cols` elements: counter `row * ceil(cols / 4) + col // 4`,
    lane `col % 4`. Key: the seed. High counter words: the offset, and the site in the top byte, which no stream of torch's own
    reaches. An element is kept when its word is at least THRESHOLD = round(p * 2**32).
    """
    seed = tl.load(state_ptr)
    offset = tl.load(state_ptr + 1)
    quads = first_col // 4 + tl.arange(0, BLOCK_N // 4)
    counter = tl.cast(rows, tl.int64)[:, None] * ((cols + 3) // 4) + quads[None, :]  # [rows, BLOCK_N / 4]
    word_0 = counter.to(tl.uint32)
    word_1 = (counter >> 32).to(tl.uint32)
    word_2 = (tl.zeros_like(counter) + offset).to(tl.uint32)
    word_3 = (tl.zeros_like(counter) + (offset >> 32) + (SITE << 24)).to(tl.uint32)
    lane_0, lane_1, lane_2, lane_3 = tl.philox(seed, word_0, word_1, word_2, word_3)
    bits = tl.interleave(tl.interleave(lane_0, lane_2), tl.interleave(lane_1, lane_3))  # [rows, BLOCK_N]
    return bits.to(tl.int64) >= THRESHOLD


@triton.jit
def apply_dropout(x, keep, SCALE: tl.constexpr):
    """`x` where kept, scaled by SCALE = 1 / (1 - p), and zero elsewhere."""
    return tl.where(keep, x * SCALE, 0.0)
