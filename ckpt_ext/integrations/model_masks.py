"""Reads the attention masks that transformers makes: by position where they are that, by ids of tokens where those say it, else whole.

A mask is read once, however many layers get it, and what is made of it is shared by them. Reading waits for the device once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..masks import AttentionMask, Mask, attention_mask
from ..reference import visible

IMPLEMENTATIONS = ("sdpa", "eager")
FLASH = ("flash_attention_2", "flash_attention_3")


class Reading(NamedTuple):
    """The mask of a call: `causal` and `window` as in `BlockSpec`, and what is data."""

    causal: bool
    window: int | None
    mask: AttentionMask | None = None
    is_dense: bool = False
    """Whether it is the given mask itself, bool, on top; that must not be kept beside the weak reference to it."""


_READ = WeakTensorKeyDictionary()
"""What was made of a mask, by mask; gone with it."""


def read(
    mask: Tensor | None, positions: Tensor | None, *, implementation: str, causal: bool, window: int | None, batch: int, length: int
) -> Reading:
    """What `mask` means to attention `implementation` of a layer that expects to be causal and to have a window.

    `mask` is None, bool `[B or 1, H or 1, T, T]` (true: seen; not for eager attention, which adds masks), floats of that shape (0: seen;
    the dtype's least number or -inf: not), or for flash attention bool `[B, T]` (false: padding). To that, `positions`, integers
    `[B or 1, T]`, tell where documents start.

    Raises NotImplementedError for anything else, a mask of other numbers among it.
    """
    if implementation in FLASH:
        return Reading(causal, window, _of_tokens(mask, positions, batch, length))
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join((*IMPLEMENTATIONS, *FLASH))
        raise NotImplementedError(f"attention implementation must be one of {known}, got {implementation}")
    if mask is None:
        # What the library's functions do then: a window is only left to a mask, and eager attention knows no causality of its own.
        return Reading(causal and implementation == "sdpa", None)
    shapes = ((batch, 1), (length, 1), (length,))
    if mask.dim() != 4 or any(mask.size(axis) not in sizes for axis, sizes in zip((0, 2, 3), shapes, strict=True)):
        raise NotImplementedError(f"attention_mask must have shape [{batch}, H, {length}, {length}], got {list(mask.shape)}")
    if mask.requires_grad:
        raise NotImplementedError("attention_mask must not require grad, got one that does: blocks have no gradient of it")
    if implementation == "eager" and not mask.is_floating_point():
        raise NotImplementedError(f"attention_mask must be floating-point numbers for eager attention, which adds it, got {mask.dtype}")
    if torch.compiler.is_compiling():  # a graph waits for nothing: the mask is taken whole
        if mask.dtype != torch.bool:
            raise NotImplementedError(f"attention_mask must be bool in a compiled model, where its numbers are not seen, got {mask.dtype}")
        return Reading(False, None, AttentionMask(dense=mask))
    key = (causal, window, length, mask._version)
    readings = _READ.setdefault(mask, {})
    if key not in readings:
        with torch.no_grad():
            readings[key] = _dense(mask, causal, window, length)
    reading = readings[key]
    return reading._replace(mask=AttentionMask(dense=mask)) if reading.is_dense else reading


def _dense(mask: Tensor, causal: bool, window: int | None, length: int) -> Reading:
    """Reads a whole mask, in the order of what is cheapest to compute with."""
    keep = mask if mask.dtype == torch.bool else mask == 0
    seen = keep.any(1).expand(-1, length, length)
    position = visible(Mask(causal, window), length, length, mask.device)[0]
    keys, queries = seen.any(1), seen.any(2)
    padding = torch.where(keys, 0, -1)
    # Of packed documents: each token's first visible key names its document, if windows do not move it along.
    first = seen.to(torch.uint8).argmax(-1)
    by_query, by_key = torch.where(queries, first, -1), torch.where(keys, first, -1)
    documents = (by_query[:, :, None] == by_key[:, None, :]) & keys[:, None, :]
    verdicts = torch.stack((
        torch.tensor(False, device=mask.device) if mask.dtype == torch.bool else _has_other_numbers(mask),
        (keep == keep[:, :1]).all(), (seen == position).all(), (seen == (position & keys[:, None, :])).all(),
        (seen == (position & documents)).all(), (seen <= position).all(),
    ))  # fmt: skip
    has_numbers, is_shared, is_positional, is_padding, is_packing, is_contained = verdicts.tolist()
    if has_numbers:
        raise NotImplementedError("attention_mask must hold zeros and its dtype's least number alone, got biases")
    if is_shared and is_positional:
        return Reading(causal, window)
    if is_shared and is_padding:
        return Reading(causal, window, attention_mask(segment_ids=(torch.zeros_like(padding), padding)))
    if is_shared and is_packing:
        return Reading(causal, window, attention_mask(segment_ids=(by_query, by_key)))
    where = (causal, window) if is_contained else (False, None)
    if mask.dtype == torch.bool:
        return Reading(*where, is_dense=True)
    return Reading(*where, AttentionMask(dense=keep))


def _has_other_numbers(mask: Tensor) -> Tensor:
    if not mask.is_floating_point():
        raise NotImplementedError(f"attention_mask must be bool or floating-point numbers, got {mask.dtype}")
    # A mask may have been cast from a wider dtype: its least number is then this one's -inf.
    return ~((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all()


def _of_tokens(mask: Tensor | None, positions: Tensor | None, batch: int, length: int) -> AttentionMask | None:
    """What flash attention makes of a mask of tokens, or, in a batch of one without a mask, of positions that start again."""
    source = positions if mask is None else mask
    if source is None or (mask is None and batch > 1):
        return None
    if source.dim() != 2 or source.size(1) != length:
        raise NotImplementedError(f"attention_mask must have shape [{batch}, {length}] for flash attention, got {list(source.shape)}")
    readings = _READ.setdefault(source, {})
    if source._version not in readings:
        with torch.no_grad():
            if mask is not None:
                ids = torch.where(source.bool(), 0, -1)
            else:
                ids = (source.diff(dim=-1, prepend=source[:, :1] - 1) != 1).cumsum(-1)
            readings[source._version] = attention_mask(segment_ids=ids) if bool((ids != 0).any()) else None
    return readings[source._version]
