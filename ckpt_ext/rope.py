"""The table of rotary angles, built once per shape and shared by all blocks."""

from functools import lru_cache

import torch
from torch import Tensor

from .reference import rope_table
from .spec import BlockSpec
from .validate import widened


def table(spec: BlockSpec, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Cosines and sines `[length, rope_dim / 2]`, float32 (float64 for a float64 stream); Nones where the block rotates nothing."""
    if spec.rope_theta is None:
        return None, None
    # Under a fake-tensor mode the table is fake too: one mode's must not serve another, nor a real run.
    mode = getattr(torch.empty(0, device=device), "fake_mode", None)
    return _build(length, spec.rope_dim, spec.rope_theta, widened(dtype), device, mode)


@lru_cache(maxsize=4)
def _build(
    length: int, dim: int, theta: float, dtype: torch.dtype, device: torch.device, fake_mode: object
) -> tuple[Tensor, Tensor]:
    # An inference tensor could not be saved for a later backward, and autocast has no say in angles.
    with torch.inference_mode(False), torch.no_grad():
        return rope_table(length, dim, theta, dtype=dtype, device=device)
