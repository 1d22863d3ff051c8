"""An MLP whose gate, up and activation are one kernel: where that is possible, and where it pays."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import Backend, FusedMlp, HiddenSpec, NormSpec
from .projections import Dense, Projection
from .rng import Dropout
from .weights import NormWeights


class FusedHidden:
    """The hidden layer of rows `[N, dim]`, from the rows before their norm (if any): nothing between them and it reaches memory."""

    def __init__(self, kernels: FusedMlp, spec: HiddenSpec) -> None:
        self._kernels, self._spec = kernels, spec

    def statistics(self, rows: Tensor) -> Tensor:
        """Of the norm of `rows`."""
        assert self._spec.norm is not None
        return self._kernels.statistics(rows, self._spec.norm)

    def forward(
        self, rows: Tensor, stats: Tensor | None, dropout: Dropout | None, *, keep: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The hidden layer, and with `keep` the outputs of up and gate by name."""
        hidden, gate, up = self._kernels.forward(rows, stats, self._spec, dropout, keep=keep)
        return hidden, {name: tensor for name, tensor in (("up", up), ("gate", gate)) if tensor is not None}

    def backward(
        self, grad: Tensor, rows: Tensor, stats: Tensor | None, dropout: Dropout | None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """`(grad_gate, grad_up, hidden)` from the gradient of the hidden layer, which is of no further use."""
        return self._kernels.backward(grad, rows, stats, self._spec, dropout)


def fused_hidden(
    backend: Backend, gate: Projection | None, up: Projection, pointwise: str, dtype: torch.dtype, device: torch.device, *,
    norm: NormSpec | None = None, norm_weights: NormWeights | None = None,
) -> FusedHidden | None:  # fmt: skip
    """The fused hidden layer of such an MLP, computed in `dtype`; None where it does not pay, or a projection is more than a matrix
    of contiguous rows."""
    kernels = backend.fused_mlp
    if kernels is None or not isinstance(up, Dense) or not (gate is None or isinstance(gate, Dense)):
        return None
    if any(part is not None and (part.weight.dim() != 2 or part.weight.stride(1) != 1) for part in (gate, up)):
        return None
    if not kernels.pays(up.weight.size(1), up.weight.size(0), dtype, device):
        return None
    (w_gate, b_gate), (w_up, b_up) = (None, None) if gate is None else _in(dtype, gate), _in(dtype, up)
    norm_weight, norm_bias = norm_weights or (None, None)
    return FusedHidden(kernels, HiddenSpec(pointwise, w_gate, b_gate, w_up, b_up, norm, norm_weight, norm_bias))


def _in(dtype: torch.dtype, projection: Dense) -> tuple[Tensor, Tensor | None]:
    return projection.weight.to(dtype), None if projection.bias is None else projection.bias.to(dtype)
