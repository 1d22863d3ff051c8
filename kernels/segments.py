"""For each tile of queries, where the keys of its documents lie, and the other way round: how attention skips what packing hides.

One program takes the ids of a tile of rows and walks over the ids of the columns that the tile reaches by position, in wide chunks. A
column counts as seen where its id lies between the lowest and the highest of the tile's that are not negative. For ids in ascending
order, those of padding anywhere at the ends, that is what some row sees; for others the span may be wider, never narrower.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .masking import mask_constants, reach
from .primitives import ptr_offset

_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _segment_spans(
    row_ids_ptr, col_ids_ptr, spans_ptr, row_id_strides, col_id_strides, row_count, col_count,
    BEHIND: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(row_count, BLOCK)
    batch = tl.program_id(0) // tiles
    first_row = tl.program_id(0) % tiles * BLOCK
    rows = first_row + tl.arange(0, BLOCK)
    row_ids = tl.load(row_ids_ptr + ptr_offset((batch, rows), row_id_strides), mask=rows < row_count, other=-1)
    lowest = tl.min(tl.where(row_ids < 0, _NO_ID, row_ids), 0)
    highest = tl.max(row_ids, 0)
    uniform = tl.min(tl.where(rows < row_count, row_ids, highest), 0) == highest

    first_seen = tl.full((CHUNK,), 0, tl.int32) + col_count
    end_seen = tl.zeros((CHUNK,), tl.int32)
    count = tl.zeros((CHUNK,), tl.int32)
    first, end = reach(first_row, tl.minimum(first_row + BLOCK, row_count), col_count, BEHIND, AHEAD)
    for start in range(first, end, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        col_ids = tl.load(col_ids_ptr + ptr_offset((batch, cols), col_id_strides), mask=cols < end, other=-1)
        seen = (col_ids >= lowest) & (col_ids <= highest)
        first_seen = tl.where(seen, tl.minimum(first_seen, cols), first_seen)
        end_seen = tl.where(seen, cols + 1, end_seen)
        count += seen.to(tl.int32)

    end = tl.max(end_seen, 0)
    first = tl.minimum(tl.min(first_seen, 0), end)
    span_ptr = spans_ptr + tl.cast(tl.program_id(0), tl.int64) * 3
    tl.store(span_ptr, first)
    tl.store(span_ptr + 1, end)
    tl.store(span_ptr + 2, (uniform & (tl.sum(count, 0) == end - first)).to(tl.int32))


def key_spans(mask, block: int, *, chunk: int = 1024) -> Tensor | None:
    """The keys that each tile of `block` queries may see, int32 `[B, tiles, 3]`; None where `mask` has no segments.

    Of a tile: the first such key, one past the last, and 1 where all between them are of one document that is every query's too. `chunk`
    keys are looked at at a time.
    """
    constants = mask_constants(mask)
    return _spans(mask.query_segments, mask.key_segments, block, chunk, constants["BEHIND"], constants["AHEAD"])


def query_spans(mask, block: int, *, chunk: int = 1024) -> Tensor | None:
    """The queries that may see some of each tile of `block` keys, as `key_spans` has it the other way round."""
    constants = mask_constants(mask)
    return _spans(mask.key_segments, mask.query_segments, block, chunk, constants["AHEAD"], constants["BEHIND"])


def _spans(row_ids: Tensor | None, col_ids: Tensor | None, block: int, chunk: int, behind: int | None, ahead: int | None) -> Tensor | None:
    if row_ids is None or col_ids is None:
        return None
    batch, row_count = row_ids.shape
    tiles = triton.cdiv(row_count, block)
    spans = torch.empty((batch, tiles, 3), dtype=torch.int32, device=row_ids.device)
    launch(
        _segment_spans,
        (batch * tiles,),
        row_ids, col_ids, spans, row_ids.stride(), col_ids.stride(), row_count, col_ids.size(1),
        BEHIND=behind,
        AHEAD=ahead,
        BLOCK=block,
        CHUNK=chunk,
    )  # fmt: skip
    return spans
