"""The table of rotary angles, built once per shape and shared by all blocks; or checked, where the caller has one."""

from functools import lru_cache

import torch
from torch import Tensor

from .reference import rope_table
from .spec import BlockSpec
from .validate import floating, widened


def table(spec: BlockSpec, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Cosines and sines `[length, rope_dim / 2]`, float32 (float64 for a float64 stream); Nones where the block rotates nothing."""
    if spec.rope_theta is None:
        return None, None
    # Under a fake-tensor mode the table is fake too: one mode's must not serve another, nor a real run.
    mode = getattr(torch.empty(0, device=device), "fake_mode", None)
    return _build(length, spec.rope_dim, spec.rope_theta, widened(dtype), device, mode)


def check(table: tuple[Tensor, Tensor], spec: BlockSpec, x: Tensor) -> None:
    """Refuse, with ValueError, cosines and sines that are not `[T, rope_dim / 2]` or `[B or 1, T, rope_dim / 2]` for `x [B, T, dim]`."""
    batch, length, _ = x.shape
    if spec.rope_dim % 2 or spec.rope_dim > spec.head_dim:
        raise ValueError(f"rope_dim must be even and at most head_dim={spec.head_dim}, got {spec.rope_dim}")
    if not isinstance(table, tuple) or len(table) != 2 or not all(isinstance(t, Tensor) for t in table):
        raise ValueError(f"table must be two tensors, cosines and sines, got {type(table).__name__}")
    for name, angles in zip(("table's cosines", "table's sines"), table, strict=True):
        floating(name, angles)
        if angles.shape[-2:] != (length, spec.rope_dim // 2) or angles.dim() not in (2, 3) or angles.shape[:-2] not in ((), (1,), (batch,)):
            shape = f"[{length}, {spec.rope_dim // 2}], with or without a batch of 1 or {batch} before it"
            raise ValueError(f"{name} must have shape {shape}, got {list(angles.shape)}")
        if angles.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {angles.device}")
        if torch.is_grad_enabled() and angles.requires_grad:
            raise ValueError(f"{name} must not require grad, for a block returns none for them, got requires_grad=True")


@lru_cache(maxsize=4)
def _build(
    length: int, dim: int, theta: float, dtype: torch.dtype, device: torch.device, fake_mode: object
) -> tuple[Tensor, Tensor]:
    # An inference tensor could not be saved for a later backward, and autocast has no say in angles.
    with torch.inference_mode(False), torch.no_grad():
        return rope_table(length, dim, theta, dtype=dtype, device=device)
