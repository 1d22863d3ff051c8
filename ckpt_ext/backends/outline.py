"""The backend of meta tensors, which have shapes and no data: it allocates what the Triton backend would, and computes nothing.

A block on the meta device therefore costs milliseconds at any length, and takes, storage by storage, the memory of a block on a GPU, as
`ckpt_ext.memory.LiveStorages` counts it. A test holds it to the Triton backend's. The fused MLP is left out, which keeps no normed rows: a
block that has it takes less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rng import Dropout
from ..scoring import Scoring
from ..validate import widened
from . import FusedMlp, NormSpec

name = "outline"
fused_mlp: FusedMlp | None = None

_PROGRAMS = 640
"""Partial sums of a norm's weight gradient at the most: a GPU has about this many programs at work."""


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    return _like(x), _statistics(x, spec)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, spec: NormSpec, *, params: bool,
    onto: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    grad_x = _like(x)
    if not params:
        return grad_x, None, None
    partials = x.new_empty((1 if bias is None else 2, min(_rows(x), _PROGRAMS), x.size(-1)), dtype=widened(x.dtype))
    grads = _like(weight), None if bias is None else _like(bias)
    del partials
    return grad_x, *grads


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, dropout: Dropout | None,
    *, into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total = _like(residual) if into is None else into
    return total, _like(x), _statistics(x, spec)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    return _by_length(x)


def attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    return _by_length(q), q.new_empty(q.shape[:3], dtype=widened(q.dtype))


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    grads = _by_length(q), _by_length(k), _by_length(v)
    rows = lse.contiguous()
    delta = torch.empty_like(rows)
    # By hand, so that the sums, a float a query and head, are there together with the gradients.
    sinks = None if scoring.sinks is None else (rows * delta).sum((0, 2)).to(scoring.sinks.dtype)
    return *grads, sinks


def activation(
    gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
) -> Tensor:
    return up if overwrite else _like(up)


def activation_backward(
    grad: Tensor, gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    if overwrite:
        return gate, up, grad
    return None if gate is None else _like(gate), _like(up), _like(up)


def dropout(x: Tensor, dropout: Dropout) -> Tensor:
    return _like(x)


def dropout_add(x: Tensor, residual: Tensor, dropout: Dropout | None) -> Tensor:
    return _like(residual)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _by_length(x: Tensor) -> Tensor:
    """A tensor of x's shape `[B, H, T, D]` that lies in memory as `[B, T, H, D]`."""
    return _like(x.transpose(1, 2)).transpose(1, 2)


def _statistics(x: Tensor, spec: NormSpec) -> Tensor:
    return x.new_empty((_rows(x), 2 if spec.kind == "layer" else 1), dtype=widened(x.dtype))


def _rows(x: Tensor) -> int:
    return x.numel() // x.size(-1)
