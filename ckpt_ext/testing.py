"""What tests of kernels share: inputs that show a stray read, outputs that show a missing write, and the rule of accuracy."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

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
