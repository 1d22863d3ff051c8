"""Which keys a query sees, and hence which tiles of them a program visits.

A `mask` argument of a launcher is any object with `causal` (bool: key j <= query i), `window` (int or None: |i - j| < window),
`query_segments` and `key_segments` (int32 `[B, Tq]` and `[B, Tk]`, or both None: ids equal and the key's not negative) and `dense` (bool
`[B, H, Tq, Tk]` or None), tensors with any strides, 0 where they are broadcast. All conditions hold at once.

By position, query i sees keys i - BEHIND .. i + AHEAD, None for no bound; key j is seen by queries j - AHEAD .. j + BEHIND. So a program
that holds a tile of queries and walks over keys, and one that holds keys and walks over queries, ask the same: which columns does some
row of the tile see, and which do all. The answer is four bounds of a walk in three phases. From `first` to `full_first` and from
`full_end` to `end` come tiles of columns that some row sees and some may not, between `full_first` and `full_end` those that every row
sees whole, where no mask is needed. Tiles outside are not visited.
"""

import triton
import triton.language as tl

from .primitives import ptr_offset


def mask_constants(mask) -> dict:
    """The compile-time arguments BEHIND and AHEAD of a kernel with `mask`."""
    # Wider than any sequence is as good as unlimited, and sums with positions must not wrap.
    reach = None if mask.window is None else min(mask.window, 2**30) - 1
    return {"BEHIND": reach, "AHEAD": 0 if mask.causal else reach}


def key_phases(mask) -> tuple[bool, bool, bool]:
    """Which phases of a walk over keys can occur: what the bounds of `key_ranges` leave empty is not compiled."""
    return _is_bounded(mask) and mask.dense is None, mask.dense is None, True


def query_phases(mask) -> tuple[bool, bool, bool]:
    """The same of a walk over queries and `query_ranges`."""
    return True, mask.dense is None, _is_bounded(mask) and mask.dense is None


def _is_bounded(mask) -> bool:
    """Whether more than causality decides where full tiles begin and end."""
    return mask.window is not None or mask.query_segments is not None


def tile_demands(mask, softcap: float | None, dropout) -> dict:
    """What of an attention asks for a smaller tile than usual, as tiles.py wants to know it."""
    return {"dropout": dropout is not None, "bounded": _is_bounded(mask), "extras": (mask.dense is not None) + (softcap is not None)}


def mask_pointers(mask, spans) -> tuple:
    """The tensors to pass as `mask_ptrs`; `spans` is None or from `segment_spans`, for the tiles of the kernel."""
    return mask.query_segments, mask.key_segments, mask.dense, spans


def mask_strides(mask) -> tuple[tuple[int, ...], ...]:
    """The strides of `mask_pointers`, without those of the spans, which are contiguous."""
    tensors = ((mask.query_segments, 2), (mask.key_segments, 2), (mask.dense, 4))
    return tuple((0,) * dims if tensor is None else tensor.stride() for tensor, dims in tensors)


@triton.jit
def visible(mask, queries, keys, query_count, key_count, BEHIND: tl.constexpr, AHEAD: tl.constexpr):
    """Which of `keys` each of `queries` may see; `mask` is `(mask_ptrs, mask_strides, batch, head)`.

    One of queries and keys is a column and the other a row: the result lies as they do.
    """
    pointers, strides, batch, head = mask
    query_ids_ptr, key_ids_ptr, dense_ptr, _ = pointers
    query_id_strides, key_id_strides, dense_strides = strides
    seen = keys < key_count
    if AHEAD is not None:
        seen = seen & (keys <= queries + AHEAD)
    if BEHIND is not None:
        seen = seen & (keys >= queries - BEHIND)
    if key_ids_ptr is not None:
        query_ids = tl.load(query_ids_ptr + ptr_offset((batch, queries), query_id_strides), mask=queries < query_count, other=-1)
        key_ids = tl.load(key_ids_ptr + ptr_offset((batch, keys), key_id_strides), mask=keys < key_count, other=-1)
        seen = seen & (query_ids == key_ids) & (key_ids >= 0)
    if dense_ptr is not None:
        dense_ptrs = dense_ptr + ptr_offset((batch, head, queries, keys), dense_strides)
        seen = seen & tl.load(dense_ptrs, mask=(queries < query_count) & (keys < key_count), other=False)
    return seen


@triton.jit
def reach(first_row, end_row, col_count, BEHIND: tl.constexpr, AHEAD: tl.constexpr):
    """`(first, end)` of the columns that by position some row of a tile sees; none where first is not below end."""
    first = 0
    end = col_count
    if BEHIND is not None:
        first = tl.maximum(first_row - BEHIND, 0)
    if AHEAD is not None:
        end = tl.minimum(end_row + AHEAD, col_count)
    return first, end


@triton.jit
def _bounds(mask, tile, tiles, first_row, end_row, col_count, BEHIND: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """`(first, full_first, full_end, end)`, first at the start of a tile of columns, but full_first and full_end not yet."""
    pointers, _, batch, _ = mask
    _, _, dense_ptr, spans_ptr = pointers
    first, end = reach(first_row, end_row, col_count, BEHIND, AHEAD)
    full_first = first
    full_end = end
    if spans_ptr is not None:
        span_ptr = spans_ptr + (tl.cast(batch, tl.int64) * tiles + tile) * 3
        first = tl.load(span_ptr)
        end = tl.load(span_ptr + 1)
        full_first = first
        full_end = tl.where(tl.load(span_ptr + 2) != 0, end, first)
    if BEHIND is not None:
        full_first = tl.maximum(full_first, end_row - 1 - BEHIND)
    if AHEAD is not None:
        full_end = tl.minimum(full_end, first_row + AHEAD + 1)
    if dense_ptr is not None:
        full_end = full_first
    if BEHIND is not None or spans_ptr is not None:  # else it stays the constant 0
        first = tl.where(first < end, first // BLOCK * BLOCK, end)
    return first, full_first, full_end, end


@triton.jit
def key_ranges(
    mask, first_query, query_count, key_count,
    BEHIND: tl.constexpr, AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bounds of a walk over keys for a tile of BLOCK_M queries. Where no tile of keys is full, all belong to the last phase."""
    end_query = tl.minimum(first_query + BLOCK_M, query_count)
    first, full_first, full_end, end = _bounds(
        mask, first_query // BLOCK_M, tl.cdiv(query_count, BLOCK_M), first_query, end_query, key_count, BEHIND, AHEAD, BLOCK_N
    )
    full_first = tl.cdiv(full_first, BLOCK_N) * BLOCK_N
    full_end = full_end // BLOCK_N * BLOCK_N
    some = full_first < full_end
    return first, tl.where(some, full_first, first), tl.where(some, full_end, first), end


@triton.jit
def query_ranges(
    mask, first_key, query_count, key_count,
    BEHIND: tl.constexpr, AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bounds of a walk over queries for a tile of BLOCK_N keys. Where no tile of queries is full, all belong to the first phase."""
    end_key = tl.minimum(first_key + BLOCK_N, key_count)
    first, full_first, full_end, end = _bounds(
        mask, first_key // BLOCK_N, tl.cdiv(key_count, BLOCK_N), first_key, end_key, query_count, AHEAD, BEHIND, BLOCK_M
    )
    full_first = tl.cdiv(full_first, BLOCK_M) * BLOCK_M
    # Lanes beyond the last query see whatever they like, but no query sees a key beyond the last.
    full_end = tl.where(full_end < query_count, full_end // BLOCK_M * BLOCK_M, query_count)
    some = (full_first < full_end) & (first_key + BLOCK_N <= key_count)
    return first, tl.where(some, full_first, end), tl.where(some, full_end, end), end
