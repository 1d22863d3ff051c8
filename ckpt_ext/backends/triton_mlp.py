"""The fused MLP kernels as a backend's `FusedMlp`."""

import torch
from torch import Tensor

from ..kernels import norm_stats as _statistics
from ..kernels import tiles
from ..kernels.mlp_backward import mlp_backward
from ..kernels.mlp_forward import mlp_forward
from ..kernels.mlp_tile import Norm
from ..rng import Dropout
from . import HiddenSpec, NormSpec


def pays(dim: int, hidden_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    return tiles.fused_mlp(dim, hidden_dim, dtype, device)


def statistics(x: Tensor, spec: NormSpec) -> Tensor:
    return _statistics.norm_stats(x, kind=spec.kind, eps=spec.eps)


def forward(
    x: Tensor, stats: Tensor | None, spec: HiddenSpec, dropout: Dropout | None, *, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return mlp_forward(x, spec.w_gate, spec.w_up, stats=stats, dropout=dropout, keep=keep, **_options(spec))


def backward(
    grad: Tensor, x: Tensor, stats: Tensor | None, spec: HiddenSpec, dropout: Dropout | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    return mlp_backward(grad, x, spec.w_gate, spec.w_up, stats=stats, dropout=dropout, overwrite=grad.is_contiguous(), **_options(spec))


def _options(spec: HiddenSpec) -> dict:
    norm = None
    if spec.norm is not None and spec.norm_weight is not None:
        norm = Norm(spec.norm.kind, spec.norm_weight, spec.norm_bias, spec.norm.offset)
    return {"b_gate": spec.b_gate, "b_up": spec.b_up, "norm": norm, "pointwise": spec.pointwise}
