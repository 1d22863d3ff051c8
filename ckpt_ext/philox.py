"""Dropout masks in plain PyTorch: the oracle of the tests and of the reference, and what runs where the C++ extension is missing.

A mask is a matrix of rows and `cols` columns, a pure function of (seed, offset, site). Element (row, col) is lane `col % 4` of
Philox4x32-10 (Salmon et al., SC 2011) at counter `row * ceil(cols / 4) + col // 4`. Words of 32 bits are held in int64 tensors.
"""

import warnings
from functools import cache
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from . import extension
from .validate import floating, probability

Word: TypeAlias = Tensor | int

SCHEMAS = {
    "dropout": "dropout(Tensor x, Tensor state, float p, int site, *, "
    "SymInt row_start=0, SymInt[]? row_strides=None, SymInt? cols=None, SymInt col_start=0) -> Tensor",
    "reserve": "reserve(Generator? generator, Device device) -> Tensor",
}
"""The operators' schemas, as csrc/module.cpp declares them."""

TAGS = {
    "dropout": (torch.Tag.pt2_compliant_tag,),
    "reserve": (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
}

_LOW = 0xFFFFFFFF
_CHUNK = 1 << 20
"""Elements of a mask that are made at a time: int64 words take eight bytes each, several times over."""


def philox4x32_10(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """The four random words at `counter` under `key`: ints or int64 tensors in [0, 2**32), broadcast against each other."""
    x, y, z, w = counter
    key_x, key_y = key
    for _ in range(10):
        # a product wraps at 2**64 and its sign is lost, but its 64 bits are right, and the mask takes off what the shift draws in
        a, b = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = (b >> 32 & _LOW) ^ y ^ key_x, b & _LOW, (a >> 32 & _LOW) ^ w ^ key_y, a & _LOW
        key_x, key_y = key_x + 0x9E3779B9 & _LOW, key_y + 0xBB67AE85 & _LOW
    return x, y, z, w


def keep_mask(
    state: Tensor, p: float, site: int, rows: int | Tensor, cols: int, *, col_start: int = 0, width: int | None = None
) -> Tensor:
    """Which elements survive dropout: bool `[*rows.shape, width]` on the device of `state`.

    `state` is int64 `[2]`, seed and offset. `rows` is an int64 tensor of row numbers, or n for rows 0 to n - 1. The columns are
    `col_start` to `col_start + width - 1` (to the last of the mask where width is None) out of `cols`.
    """
    if isinstance(rows, int):
        rows = torch.arange(rows, device=state.device)
    col = torch.arange(col_start, cols if width is None else col_start + width, device=state.device)
    first, last = col_start // 4, (col_start + len(col) + 3) // 4
    counter = rows[..., None] * ((cols + 3) // 4) + torch.arange(first, last, device=state.device)
    seed, offset = state.unbind()
    words = philox4x32_10(
        (counter & _LOW, counter >> 32 & _LOW, offset & _LOW, offset >> 32 & _LOW | int(site) << 24), (seed & _LOW, seed >> 32 & _LOW)
    )
    lanes = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)  # [*rows.shape, 4 * (last - first)]
    return lanes[..., col_start - 4 * first :][..., : len(col)] >= threshold(p)


def threshold(p: float) -> int:
    """The smallest word that survives: `round(p * 2**32)`. At p = 1 it is 2**32, which no word reaches."""
    return round(p * 2**32)


def dropout(
    x: Tensor, state: Tensor, p: float, site: int, *,
    row_start: int = 0, row_strides: list[int] | None = None, cols: int | None = None, col_start: int = 0,
) -> Tensor:  # fmt: skip
    """`ckpt_ext::dropout` (see `ckpt_ext.rng.dropout`), without the extension."""
    _warn()
    width = x.size(-1) if x.dim() else 1
    check(x, state, p, site, width, row_start=row_start, row_strides=row_strides, cols=cols, col_start=col_start)
    if not 0 <= int(state[1]) < 2**56:
        raise ValueError(f"state must hold an offset in [0, 2**56), got {int(state[1])}")
    scale = 0.0 if p == 1 else 1 / (1 - p)
    leading = x.shape[:-1]
    rows = row_start + _row_numbers(leading, row_strides).flatten()
    dense = x.reshape(prod(leading), width)
    out = torch.zeros_like(dense, memory_format=torch.contiguous_format)
    step = max(1, _CHUNK // max(1, width))
    for part in range(0, len(rows), step):
        piece = slice(part, part + step)
        keep = keep_mask(state, p, site, rows[piece], width if cols is None else cols, col_start=col_start, width=width)
        out[piece] = torch.where(keep, dense[piece] * scale, 0)
    return out.reshape(x.shape)


def _row_numbers(shape: torch.Size, strides: list[int] | None) -> Tensor:
    """Row numbers `[*shape]` under `strides`, those of a contiguous tensor where None."""
    if strides is None:
        return torch.arange(prod(shape)).reshape(shape)
    rows = torch.zeros(shape, dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        rows += (torch.arange(size) * stride).reshape(-1, *[1] * (len(shape) - axis - 1))
    return rows


def check(
    x: Tensor, state: Tensor, p: float, site: int, width: int, *,
    row_start: int, row_strides: list[int] | None, cols: int | None, col_start: int,
) -> None:  # fmt: skip
    """Refuse what `ckpt_ext::dropout` refuses, by ValueError and in the words of csrc/dropout.cpp."""
    floating("x", x)
    probability("p", p)
    if not 1 <= site <= 255:
        raise ValueError(f"site must be in 1..255, got {site}")
    if state.dtype != torch.int64 or state.shape != (2,) or state.device != x.device:
        raise ValueError(
            f"state must be int64 of shape [2] on {x.device}, got {state.dtype} of shape {list(state.shape)} on {state.device}"
        )
    if row_start < 0:
        raise ValueError(f"row_start must not be negative, got {row_start}")
    if col_start < 0:
        raise ValueError(f"col_start must not be negative, got {col_start}")
    if cols is not None and cols - col_start < width or cols is None and col_start > 0:
        raise ValueError(f"cols must be at least col_start + x.size(-1) = {col_start} + {width}, got {width if cols is None else cols}")
    if row_strides is not None and (len(row_strides) != x.dim() - bool(x.dim()) or min(row_strides, default=0) < 0):
        raise ValueError(f"row_strides must be {x.dim() - bool(x.dim())} non-negative numbers, got {row_strides}")


def reserve(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """`ckpt_ext::reserve` (see `ckpt_ext.rng.reserve`), without the extension."""
    if generator is not None and generator.device.type != device.type:
        raise ValueError(f"generator must be on {device.type}, got one on {generator.device}")
    state = torch.zeros(2, dtype=torch.int64)
    if device.type == "cpu":
        state[0].random_(generator=generator)
        return state
    if generator is None:
        generator = default_generator(device)
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 4)
    state[0] = seed - (seed >> 63 << 64)  # the 64 bits as a signed number
    state[1] = offset
    return state.to(device)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `device` draws from where none is given; NotImplementedError where it has none."""
    if device.type == "cpu":
        return torch.default_generator
    try:
        backend = torch.get_device_module(device)
        index = backend.current_device() if device.index is None else device.index
        backend.init()
        return backend.default_generators[index]
    except (AttributeError, RuntimeError) as error:
        raise NotImplementedError(
            f"device must have a random generator (the CPU or an accelerator), got {device}"
        ) from error


@cache
def _warn() -> None:
    warnings.warn(f"dropout runs in Python, which is slow: {extension.status().reason}", stacklevel=2)
