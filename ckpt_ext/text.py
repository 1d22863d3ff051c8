"""Text to train a byte-level language model on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

SYMBOLS = 256
"""One symbol a byte."""


def read(path: str | Path | None = None) -> bytes:
    """The bytes of the file at `path`, or the English prose that every CPython carries: the help topics of `pydoc_data`, half a megabyte.

    Raises OSError where the file cannot be read.
    """
    if path:
        return Path(path).read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(text for _, text in sorted(topics.items())).encode()


def batches(text: bytes, count: int, batch: int, length: int, seed: int) -> Tensor:
    """`count` batches of windows of `text` at places drawn from `seed`: int64 `[count, batch, length + 1]`.

    A model reads the first `length` symbols of a window and predicts the last `length`.

    Raises ValueError where the text is shorter than one window.
    """
    if len(text) <= length:
        raise ValueError(f"text must have more than length={length} bytes, got {len(text)}")
    symbols = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(text) - length, (count, batch, 1), generator=torch.Generator().manual_seed(seed))
    return symbols[starts + torch.arange(length + 1)].long()
