"""What a training run holds beside its blocks' activations: parameters, gradients, optimizer state, the head and its loss."""

from __future__ import annotations

import re

_UNITS = {"": 1, **{f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}} | {
    f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)
}


def parse_bytes(text: str) -> int:
    """Bytes of a size as people write it: "24GB" is 24e9, "24GiB" is 24 * 2**30, "123" is 123; case and spaces do not matter.

    Raises ValueError for anything else, and for what is no positive number of bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or int(float(match[1]) * _UNITS[match[2]]) < 1:
        raise ValueError(f"a size must be a positive number and a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(size: int) -> str:
    """A size in decimal units, as vendors name memories: "24.0 GB"."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"
