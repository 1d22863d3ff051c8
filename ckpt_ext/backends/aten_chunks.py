"""Chunks of an attention: some query rows of some heads, the keys that any of them can see by position, and the mask between the two.

What hides a key by position is known on the host, and such keys are left out of a chunk. What hides it by data is in tensors that are
never read on the host: those keys are masked within the chunk, and the mask of no more than one chunk is alive at a time.
"""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Mask
from ..rng import Dropout

_LEAST_ROWS = 64
"""A chunk takes fewer heads rather than fewer query rows than this: a matrix product of few rows is bound by reading k and v."""


Bounds = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


class Chunk(NamedTuple):
    """Where the chunk lies: from which index to which of the first three axes of `[B, H, Tq, D]` and of `[B, KV, Tk, D]`."""

    query_bounds: Bounds
    key_bounds: Bounds
    whole: torch.Size
    """Of all scores, `[B, H, Tq, Tk]`."""

    # torch.compile takes slices that an object holds for constants, and would compile again for each length.
    @property
    def queries(self) -> tuple[slice, slice, slice]:
        entries, heads, rows = self.query_bounds
        return slice(*entries), slice(*heads), slice(*rows)

    @property
    def keys(self) -> tuple[slice, slice, slice]:
        entries, heads, rows = self.key_bounds
        return slice(*entries), slice(*heads), slice(*rows)

    @property
    def sees_no_key(self) -> bool:
        return self.keys[2].start >= self.keys[2].stop

    @property
    def at_origin(self) -> bool:
        """Whether it holds the first query and the first key, so that causality within it is that of the whole."""
        return self.queries[2].start == self.keys[2].start == 0

    def hidden(self, mask: Mask, device: torch.device, *, causal: bool) -> Tensor | None:
        """True where `mask` hides a key, its causality where `causal` only; None where nothing is hidden.

        Bool, 4-dimensional, broadcastable to the chunk's scores `[b, h, rows, keys]`.
        """
        (batch, heads, rows), keys = self.queries, self.keys[2]
        query, key = torch.arange(rows.start, rows.stop, device=device)[:, None], torch.arange(keys.start, keys.stop, device=device)
        parts: list[Tensor] = []
        ahead = 1 if causal else mask.window
        if ahead is not None and keys.stop > rows.start + ahead:
            parts.append((key >= query + ahead)[None, None])
        if mask.window is not None and rows.stop > keys.start + mask.window:
            parts.append((key <= query - mask.window)[None, None])
        of_query, of_key, dense = _unrepeated(mask)
        if of_query is not None and of_key is not None:
            of_query, of_key = _part(of_query, (batch, rows))[:, None, :, None], _part(of_key, (batch, keys))[:, None, None]
            parts.append((of_query != of_key).logical_or_(of_key < 0))
        if dense is not None:
            parts.append(~_part(dense, (batch, heads, rows, keys)))
        return reduce(torch.logical_or, parts) if parts else None

    def drop(self, weights: Tensor, dropout: Dropout) -> Tensor:
        """Dropout of `weights [b, h, rows, keys]`, with the mask that the whole would get."""
        _, heads, length, key_count = self.whole
        strides = [dropout.batch_rows or heads * length, length, 1]
        start = sum(part.start * stride for part, stride in zip(self.queries, strides, strict=True))
        return torch.ops.ckpt_ext.dropout(
            weights, dropout.state, dropout.p, int(dropout.site), cols=key_count, col_start=self.keys[2].start,
            row_start=dropout.row_start + start, row_strides=strides,
        )


def mask_shape(mask: Mask, query_count: int, key_count: int) -> torch.Size:
    """The shape of `mask` without causality, `[B, H, Tq, Tk]` with 1 for what it does not depend on."""
    shapes = [torch.Size((1, 1, 1, 1))] if mask.window is None else [torch.Size((1, 1, query_count, key_count))]
    of_query, of_key, dense = _unrepeated(mask)
    if of_query is not None and of_key is not None:
        shapes += [of_query[:, None, :, None].shape, of_key[:, None, None].shape]
    if dense is not None:
        shapes.append(dense.shape)
    return torch.broadcast_shapes(*shapes)


def chunks(q: Tensor, k: Tensor, mask: Mask, held: torch.Size, elements: int) -> Iterator[Chunk]:
    """Chunks that cover q, such that at most `elements` of a tensor of the shape `held`, `[B, H, Tq, Tk]`, are alive at a time.

    An axis of which `held` has 1 costs nothing. A chunk has one row at least, however many keys there are.
    """
    if not q.numel():
        return
    (batch, heads, length, _), (_, kv_heads, key_count, _) = q.shape, k.shape
    whole = torch.Size((batch, heads, length, key_count))
    window = mask.window
    most_rows, most_keys = length, key_count
    if window is not None:
        # A chunk of as many rows as the window is wide computes no more than twice what is seen.
        most_rows = min(length, max(window, _LEAST_ROWS))
        most_keys = min(key_count, most_rows + (window if mask.causal else 2 * window))
    group = heads // kv_heads
    least_rows = 1 if held[2] == 1 else min(_LEAST_ROWS, most_rows)
    fitting = elements // max(1, least_rows * most_keys)
    kv_step = kv_heads if held[1] == 1 else _within(fitting // group, kv_heads)
    head_cost = 1 if held[1] == 1 else kv_step * group
    batch_step = batch if held[0] == 1 else _within(fitting // head_cost, batch)
    batch_cost = 1 if held[0] == 1 else batch_step
    row_step = most_rows if held[2] == 1 else _within(elements // max(1, batch_cost * head_cost * most_keys), most_rows)
    for entries in _spans(batch, batch_step):
        for of_keys in _spans(kv_heads, kv_step):
            of_queries = of_keys[0] * group, of_keys[1] * group
            for rows in _spans(length, row_step):
                start, stop = rows
                first = 0 if window is None else max(0, start - window + 1)
                last = min(key_count, stop if mask.causal else key_count if window is None else stop - 1 + window)
                yield Chunk((entries, of_queries, rows), (entries, of_keys, (first, last)), whole)


def _within(size: int, most: int) -> int:
    return max(1, min(size, most))


def _spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    if 0 < total <= size:  # without a range, which makes a compiler compile again for each total
        return iter(((0, total),))
    return ((start, min(start + size, total)) for start in range(0, total, max(1, size)))


def _unrepeated(mask: Mask) -> list[Tensor | None]:
    """The tensors of `mask`, with 1 in place of the size of each axis along which they only repeat."""
    tensors = (mask.query_segments, mask.key_segments, mask.dense)
    return [None if t is None else t[tuple(slice(None if stride else 1) for stride in t.stride())] for t in tensors]


def _part(x: Tensor, slices: tuple[slice, ...]) -> Tensor:
    return x[tuple(slice(None) if size == 1 else part for size, part in zip(x.shape, slices, strict=True))]
