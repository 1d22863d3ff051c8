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
    scale = _scale(weight, spec, rows.dtype)
    if spec.kind == "layer":
        shift = None if bias is None else bias.to(rows.dtype)
        y, mean, rstd = _aten.native_layer_norm(rows, [rows.size(-1)], scale, shift, spec.eps)
        return y.to(x.dtype), torch.cat((mean, rstd), -1).view(-1, 2)
    mean_square = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(rows.size(-1))
    rstd = mean_square.add_(spec.eps).rsqrt_()
    y = (rows * rstd).mul_(scale)
    if bias is not None:
        y += bias
    return y.to(x.dtype), rstd.view(-1, 1)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, spec: NormSpec, *, params: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rows, grad_rows = (_wide(t).reshape(-1, x.size(-1)) for t in (x, grad))
    scale = _scale(weight, spec, rows.dtype)
    if spec.kind == "layer":
        mean, rstd = stats[:, :1].contiguous(), stats[:, 1:].contiguous()
        shift = None if bias is None else bias.to(rows.dtype)
        grad_x, grad_weight, grad_bias = _aten.native_layer_norm_backward(
            grad_rows, rows, [rows.size(-1)], mean, rstd, scale, shift, [True, params, params and bias is not None]
        )
    else:
        # With g = grad * weight and x^ = x * rstd:  dx = rstd * (g - x^ * mean(g * x^)),  dweight = sum(grad * x^).
        normed = rows * stats
        product = grad_rows * normed
        grad_weight = product.sum(0) if params else None
        grad_bias = grad_rows.sum(0) if params and bias is not None else None
        inner = torch.mv(product, scale).div_(rows.size(-1)).unsqueeze(-1)
        grad_x = torch.mul(grad_rows, scale, out=product).addcmul_(normed, inner, value=-1).mul_(stats)
    params_like = ((grad_weight, weight), (grad_bias, bias))
    grad_weight, grad_bias = (None if g is None else g.to(p.dtype) for g, p in params_like)  # type: ignore[union-attr]
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
