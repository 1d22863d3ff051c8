"""The backend of ATen operators: any device, and the one that does real work on a CPU.

Norm statistics and elementwise work are in float32, or float64 for float64 tensors. Attention is `aten_attention`'s.
"""

import torch
from torch import Tensor

from .. import rng
from ..rng import Dropout
from . import NormSpec
from .aten_attention import attention, attention_backward

__all__ = [
    "activation", "activation_backward", "attention", "attention_backward", "dropout", "dropout_add", "name", "norm", "norm_backward",
    "rotate",
]

name = "aten"
_aten = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    rows = _wide(x)
    if spec.kind == "layer":
        mean = rows.mean(-1, keepdim=True)
        rows = rows - mean
    mean_square = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(rows.size(-1))
    rstd = mean_square.add_(spec.eps).rsqrt_()
    y = (rows * rstd).mul_(_scale(weight, spec, rows.dtype))
    if bias is not None:
        y += bias
    stats = torch.cat((mean, rstd), -1) if spec.kind == "layer" else rstd
    return y.to(x.dtype), stats.view(-1, stats.size(-1))


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, spec: NormSpec, *, params: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # With g = grad * weight and x^ = (x - mean) * rstd:  dx = rstd * (g - mean(g) - x^ * mean(g * x^)), without mean(g) for RMSNorm.
    rows = _wide(x).reshape(-1, x.size(-1))
    grad_rows = _wide(grad).reshape(-1, x.size(-1))
    rstd = stats[:, -1:]
    normed = (rows - stats[:, :1]).mul_(rstd) if spec.kind == "layer" else rows * rstd
    grad_weight = grad_bias = None
    if params:
        grad_weight = torch.einsum("nc,nc->c", grad_rows, normed).to(weight.dtype)
        grad_bias = None if bias is None else grad_rows.sum(0).to(bias.dtype)
    scaled = grad_rows * _scale(weight, spec, rows.dtype)
    inner = torch.linalg.vecdot(scaled, normed).div_(rows.size(-1)).unsqueeze(-1)
    if spec.kind == "layer":
        scaled -= scaled.mean(-1, keepdim=True)
    grad_x = scaled.addcmul_(normed, inner, value=-1).mul_(rstd)
    return grad_x.to(x.dtype).view(x.shape), grad_weight, grad_bias


def _scale(weight: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    scale = weight.to(dtype)
    return scale + spec.offset if spec.offset else scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    batch, heads, length, dim = x.shape
    half = cos.size(-1)
    out = x.new_empty(batch, length, heads, dim).transpose(1, 2)
    first, second = _wide(x[..., :half]), _wide(x[..., half : 2 * half])
    sign = -1 if inverse else 1
    out[..., :half] = (first * cos).addcmul_(second, sin, value=-sign)
    out[..., half : 2 * half] = (second * cos).addcmul_(first, sin, value=sign)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def activation(gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None) -> Tensor:
    hidden = _activate(up, pointwise) if gate is None else _activate(gate, pointwise).mul_(up)
    return hidden if dropout is None else rng.dropout(hidden, dropout)


def activation_backward(
    grad: Tensor, gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    if dropout is not None:
        grad = rng.dropout(grad, dropout)
    hidden = activation(gate, up, pointwise, dropout)
    if gate is None:
        return None, _derivative(grad, up, pointwise), hidden
    grad_gate = _derivative(grad * up, gate, pointwise)
    return grad_gate, _activate(gate, pointwise).mul_(grad), hidden


def _activate(x: Tensor, pointwise: str) -> Tensor:
    """A new tensor, which the caller may write to."""
    match pointwise:
        case "silu":
            return _aten.silu(x)
        case "gelu":
            return _aten.gelu(x)
        case "gelu_tanh":
            return _aten.gelu(x, approximate="tanh")
        case "relu":
            return _aten.relu(x)
        case _:
            return _aten.relu(x).square_()


def _derivative(grad: Tensor, x: Tensor, pointwise: str) -> Tensor:
    """`grad * f'(x)`."""
    match pointwise:
        case "silu":
            return _aten.silu_backward(grad, x)
        case "gelu":
            return _aten.gelu_backward(grad, x)
        case "gelu_tanh":
            return _aten.gelu_backward(grad, x, approximate="tanh")
        case "relu":
            return _aten.threshold_backward(grad, x, 0)
        case _:
            return _aten.relu(x).mul_(grad).mul_(2)


def dropout(x: Tensor, dropout: Dropout) -> Tensor:
    return rng.dropout(x, dropout)


def dropout_add(x: Tensor, residual: Tensor, dropout: Dropout | None) -> Tensor:
    return residual + (x if dropout is None else rng.dropout(x, dropout))
