"""Which keys a query sees: causal and window by position, packed documents and padding by the ids of tokens, anything else by a dense mask.

All conditions hold at once. Those by position are static; the rest is data, `AttentionMask`, made once and shared by all blocks of a model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .validate import instance, integer, is_integer


class AttentionMask(NamedTuple):
    """The part of a mask that is data; `attention_mask` makes one. None stands for no condition."""

    query_segments: Tensor | None = None
    """int32 `[B, Tq]`: the document of each query; given with `key_segments` or not at all."""
    key_segments: Tensor | None = None
    """int32 `[B, Tk]`: the document of each key, seen by the queries of the same document only; negative where no query sees it."""
    dense: Tensor | None = None
    """bool `[B, H, Tq, Tk]`, any of them 1: true where the key may be seen."""


class Mask(NamedTuple):
    """All conditions under which query i sees key j. Positions are counted from the first query and the first key, also if Tq != Tk."""

    causal: bool = False
    """j <= i."""
    window: int | None = None
    """|i - j| < window: as many keys, the query's own included, to each side that `causal` leaves."""
    query_segments: Tensor | None = None
    """With `key_segments`: equal ids, and the key's not negative."""
    key_segments: Tensor | None = None
    dense: Tensor | None = None
    """bool `[B, H, Tq, Tk]`, of any strides, those of a broadcast 0."""

    def of_heads(self, heads: slice) -> Mask:
        """The mask of some of the heads."""
        return self if self.dense is None else self._replace(dense=self.dense[:, heads])


def attention_mask(
    *, segment_ids: Tensor | tuple[Tensor, Tensor] | None = None, cu_seqlens: Tensor | None = None, key_mask: Tensor | None = None,
    mask: Tensor | None = None, length: int | None = None,
) -> AttentionMask | None:  # fmt: skip
    """What blocks and `functional.attention` mask by, besides causality and window; None where nothing is given.

    Args:
        segment_ids: integers `[B, T]`, the document of each token in a packed row; no attention crosses from one id to another.
            Negative: padding, which sees nothing and is not seen. A pair, `[B, Tq]` and `[B, Tk]`, where queries and keys differ.
        cu_seqlens: integers `[documents + 1]`, the bounds of the documents packed in a batch of one; needs `length`, the tokens in all.
            Tokens before the first bound and from the last on are padding.
        key_mask: bool `[B, Tk]`, true where a key may be seen, false where it is padding, on either side.
        mask: bool, 4-dimensional and broadcastable to `[B, H, Tq, Tk]`, true where a key may be seen, as in
            `scaled_dot_product_attention`. One that is the same for all queries and heads, `[B, 1, 1, Tk]`, is a `key_mask`, and fast; any
            other is read whole.

    Queries that see no key get zeros. Raises ValueError for a wrong shape or dtype, NotImplementedError for an additive mask.
    """
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids must be a Tensor or a pair of them, got {len(pair)}")
    given = {"segment_ids of queries": pair[0], "segment_ids of keys": pair[1], "cu_seqlens": cu_seqlens, "key_mask": key_mask}
    for name, tensor in (given | {"mask": mask}).items():
        if tensor is not None:
            instance(name, tensor, Tensor)
    if mask is not None:
        _check_dense(mask)
        if mask.shape[1:3] == (1, 1):
            rows = mask[:, 0, 0]
            if key_mask is not None:
                _check_together("key_mask", key_mask, "mask", rows)
            key_mask, mask = rows if key_mask is None else key_mask & rows, None
    if key_mask is not None and (key_mask.dim() != 2 or key_mask.dtype != torch.bool):
        raise ValueError(f"key_mask must be bool [B, Tk], true where a key may be seen, got {key_mask.dtype} {list(key_mask.shape)}")
    if cu_seqlens is not None:
        if segment_ids is not None or length is None:
            raise ValueError("cu_seqlens must come with length and without segment_ids")
        ids_of_tokens = _segments_between(cu_seqlens, length)
        pair = ids_of_tokens, ids_of_tokens
    queries, keys = pair
    for name, ids in (("segment_ids of queries", queries), ("segment_ids of keys", keys)):
        if ids is not None and (ids.dim() != 2 or not is_integer(ids)):
            raise ValueError(f"{name} must be integers [B, T], got {ids.dtype} {list(ids.shape)}")
    queries, keys = _in_32_bits(queries, keys)
    if key_mask is not None:
        if keys is not None:
            _check_together("key_mask", key_mask, "segment_ids of keys", keys)
        keys = torch.where(key_mask, torch.zeros((), dtype=torch.int32, device=key_mask.device) if keys is None else keys, -1)
        if queries is None:
            queries = keys.new_zeros(1, 1)
    if keys is None and mask is None:
        return None
    return AttentionMask(queries, keys, mask)


def full_mask(
    data: AttentionMask | None, *, causal: bool, window: int | None, shape: tuple[int, int, int, int], device: torch.device
) -> Mask:
    """The mask of an attention over `shape`, `[B, H, Tq, Tk]`; raises ValueError where `data` does not fit it, naming the part."""
    if data is None:
        return Mask(causal, window)
    instance("mask", data, AttentionMask)
    if (data.query_segments is None) != (data.key_segments is None):
        raise ValueError("mask's query_segments and key_segments must be given together or not at all")
    batch, _, query_count, key_count = shape
    places = {"query_segments": (batch, query_count), "key_segments": (batch, key_count), "dense": shape}
    expanded: dict[str, Tensor | None] = {}
    for name, tensor in data._asdict().items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"mask's {name} must be on the device of the queries {device}, got {tensor.device}")
        try:
            expanded[name] = None if tensor is None else tensor.expand(places[name])
        except RuntimeError:
            raise ValueError(f"mask's {name} must have or broadcast to shape {list(places[name])}, got {list(tensor.shape)}") from None
        dtype = torch.bool if name == "dense" else torch.int32
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(f"mask's {name} must be {dtype}, as attention_mask makes it, got {tensor.dtype}")
    return Mask(causal, window, **expanded)


def _check_dense(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise NotImplementedError(
            f"mask must be bool, true where a key may be seen, got {mask.dtype}; of an additive mask of zeros and minus infinities pass "
            "`mask == 0`, biases are not supported"
        )
    if mask.dim() != 4:
        raise ValueError(f"mask must have shape [B, H, Tq, Tk], any of them 1, got {list(mask.shape)}")


def _segments_between(cu_seqlens: Tensor, length: int) -> Tensor:
    """The document of each of `length` tokens, int32 `[1, length]`, -1 outside of all bounds. Reads no value on the host."""
    integer("length", length)
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or not is_integer(cu_seqlens):
        raise ValueError(f"cu_seqlens must be integers [documents + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    bounds = cu_seqlens.to(torch.int64).contiguous()
    tokens = torch.arange(length, device=bounds.device)
    ids = torch.searchsorted(bounds, tokens, right=True) - 1
    return torch.where(tokens < bounds[-1], ids, -1)[None].to(torch.int32)


def _in_32_bits(queries: Tensor | None, keys: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The ids in int32; those that might not fit are counted anew in each row, in their order, negative ones all as -1."""
    if queries is None or keys is None:
        return None, None
    if max(queries.dtype.itemsize, keys.dtype.itemsize) <= 4 and torch.uint32 not in (queries.dtype, keys.dtype):
        return queries.to(torch.int32), keys.to(torch.int32)
    apart = queries is not keys
    ids = torch.cat((queries.long(), keys.long()), 1) if apart else queries.long()
    ordered, places = ids.sort(1)
    ranks = torch.nn.functional.pad((ordered[:, 1:] != ordered[:, :-1]).to(torch.int32), (1, 0)).cumsum(1, dtype=torch.int32)
    counted = torch.empty_like(ranks).scatter_(1, places, ranks).masked_fill_(ids < 0, -1)
    return (counted[:, : queries.size(1)], counted[:, queries.size(1) :]) if apart else (counted, counted)


def _check_together(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    try:
        torch.broadcast_shapes(tensor.shape, other.shape)
    except RuntimeError:
        raise ValueError(f"{name} must fit {other_name} {list(other.shape)}, got {list(tensor.shape)}") from None
