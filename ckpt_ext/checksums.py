"""Exact checksums of tensors: 64 bits of their bytes, made on their device and without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

# Words of 64 bits would put their highest bits where the sum has no room: two changes of sign would cancel.
_WORD_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_MIX = -7046029254386353131  # 2**64 divided by the golden ratio, odd, as a signed word
_CHUNK = 1 << 20
"""Words summed at a time: the temporaries take at most 32 MiB whatever the tensor's size."""


def checksum(x: Tensor) -> Tensor:
    """A checksum of the bits of `x`, in order: int64 `[]` on x's device, without a host sync.

    sum(word_i * weight_i) modulo 2**64 over words of up to 32 bits, with odd weights: odd numbers have an inverse, so no change of one
    word goes unseen, be it by a bit. Equal NaNs are equal, and 0.0 and -0.0 are not. Strides do not matter. Tensors made of other tensors
    (sharded, quantised, sparse) are summed over their parts.

    Raises NotImplementedError for a layout whose parts are unknown.
    """
    with torch.no_grad():
        return _sum_of_parts(_parts(x)) if _parts(x) else _strided(x)


def _parts(x: Tensor) -> list[Tensor]:
    if hasattr(x, "__tensor_flatten__"):
        return [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    if x.layout is torch.strided:
        return []
    if x.layout is torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    raise NotImplementedError(f"checksums are made of strided and sparse tensors, got layout {x.layout}")


def _sum_of_parts(parts: list[Tensor]) -> Tensor:
    total = checksum(parts[0])
    for part in parts[1:]:
        total = total * _MIX + checksum(part)
    return total


def _strided(x: Tensor) -> Tensor:
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    words = x.resolve_neg().reshape(-1).view(_WORD_OF_SIZE[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        total += _weights(start, chunk.numel(), x.device).mul_(chunk).sum()
    return total


def _weights(start: int, count: int, device: torch.device) -> Tensor:
    # Not in arithmetic progression: the differences of two words would cancel those of two others as far apart.
    weights = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device).mul_(_MIX)
    return weights.bitwise_xor_(weights >> 31).mul_(_MIX).bitwise_or_(1)
