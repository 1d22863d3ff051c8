"""The backend of Triton kernels: GPUs, and CPU tensors under Triton's interpreter."""

from torch import Tensor

from ..kernels.activation import activation_backward as _activation_backward
from ..kernels.activation import activation_forward
from ..kernels.attention_backward import attention_backward
from ..kernels.attention_forward import attention_forward as attention
from ..kernels.norm import norm_backward as _norm_backward
from ..kernels.norm import norm_forward
from ..kernels.residual import dropout, dropout_add
from ..kernels.rope import rotate
from ..rng import Dropout
from . import NormSpec

__all__ = [
    "activation", "activation_backward", "attention", "attention_backward", "dropout", "dropout_add", "name", "norm", "norm_backward",
    "rotate",
]  # fmt: skip

name = "triton"


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    return norm_forward(x, weight, bias, **spec._asdict())


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, spec: NormSpec, *, params: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _norm_backward(grad, x, weight, bias, stats, kind=spec.kind, offset=spec.offset, params=params)


def activation(
    gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
) -> Tensor:
    return activation_forward(gate, up, pointwise=pointwise, dropout=dropout, overwrite=overwrite)


def activation_backward(
    grad: Tensor, gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    return _activation_backward(grad, gate, up, pointwise=pointwise, dropout=dropout, overwrite=overwrite)
