"""The backend of Triton kernels: GPUs, and CPU tensors under Triton's interpreter."""

from torch import Tensor

from ..kernels.activation import activation_backward as _activation_backward
from ..kernels.activation import activation_forward
from ..kernels.add_norm import add_norm as _add_norm
from ..kernels.attention_backward import attention_backward as _attention_backward
from ..kernels.attention_forward import attention_forward
from ..kernels.norm import norm_backward as _norm_backward
from ..kernels.norm import norm_forward
from ..kernels.residual import dropout, dropout_add
from ..kernels.rope import rotate
from ..rng import Dropout
from ..scoring import Scoring
from . import NormSpec
from . import triton_mlp as fused_mlp

__all__ = [
    "activation", "activation_backward", "add_norm", "attention", "attention_backward", "dropout", "dropout_add", "fused_mlp", "name",
    "norm", "norm_backward", "rotate",
]  # fmt: skip

name = "triton"


def attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    return attention_forward(q, k, v, **scoring._asdict())


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return _attention_backward(grad, q, k, v, out, lse, **scoring._asdict())


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    return norm_forward(x, weight, bias, **spec._asdict())


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, spec: NormSpec, *, params: bool,
    onto: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _norm_backward(grad, x, weight, bias, stats, kind=spec.kind, offset=spec.offset, params=params, onto=onto)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, dropout: Dropout | None,
    *, into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _add_norm(x, residual, weight, bias, **spec._asdict(), dropout=dropout, into=into)


def activation(
    gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
) -> Tensor:
    return activation_forward(gate, up, pointwise=pointwise, dropout=dropout, overwrite=overwrite)


def activation_backward(
    grad: Tensor, gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    return _activation_backward(grad, gate, up, pointwise=pointwise, dropout=dropout, overwrite=overwrite)
