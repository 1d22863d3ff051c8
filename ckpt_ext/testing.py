"""What tests share: inputs that show a stray read, outputs that show a missing write, blocks to compare, and the rule of accuracy."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .modules import EagerBlock, TransformerBlock
from .spec import BlockSpec
from .validate import widened


def framed(x: Tensor) -> Tensor:
    """`x` as a slice of a larger tensor full of NaN, so that a load outside of its mask spoils the result."""
    frame = torch.full([size + 4 for size in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    inside = frame[tuple(slice(2, 2 + size) for size in x.shape)]
    return inside.copy_(x)


def poison_allocations(monkeypatch, package: str = "ckpt_ext.kernels") -> None:
    """Fill with NaN what modules of `package` get from `torch.empty` and its like, so that an element never written is seen."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            out = allocate(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return out.fill_(torch.nan) if caller.startswith(package) and out.is_floating_point() else out

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def assert_accurate(actual: Tensor, eager: Tensor, truth: Tensor, *, terms: int = 1, magnitude: float = 0.0) -> None:
    """Require `error(actual) <= 2 * error(eager) + rounding` against a float64 `truth`.

    The rounding is that of the output, once, and of sums of `terms` terms in the accumulation dtype, of values as large as the truth or
    as `magnitude`, where terms cancel.
    """
    assert actual.shape == truth.shape, f"shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    if not truth.numel():
        return
    largest = max(truth.abs().max().item(), magnitude)
    accumulator = widened(actual.dtype)
    rounding = largest * (torch.finfo(actual.dtype).eps + 4 * (terms + 2) * torch.finfo(accumulator).eps)
    error = (actual.double() - truth).abs().max().item()
    eager_error = (eager.double() - truth).abs().max().item()
    assert error <= 2 * eager_error + rounding, f"error {error:.3g} > 2 * {eager_error:.3g} (eager) + {rounding:.3g} (rounding)"


def eager_block(spec: BlockSpec, dtype: torch.dtype = torch.float64) -> EagerBlock:
    """An eager block of random parameters, always the same. None is a plain 1 or 0, which would hide that it is not used."""
    torch.manual_seed(3)
    block = EagerBlock(spec, dtype=dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return block


def twin(
    block: TransformerBlock, kind: type[TransformerBlock] = TransformerBlock, dtype: torch.dtype | None = None, **arguments: Any
) -> TransformerBlock:
    """A block of `kind` with the same spec and parameters, made with `arguments`."""
    other = kind(block.spec, dtype=dtype or block.q_proj.weight.dtype, **arguments)
    other.load_state_dict(block.state_dict())
    return other
