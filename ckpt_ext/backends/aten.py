"""The backend of ATen operators: any device, and the one that does real work on a CPU.

Norm statistics and elementwise work are in float32, or float64 for float64 tensors. Attention is `aten_attention`'s.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import rng
from ..rng import Dropout
from ..validate import widened
from . import FusedMlp, NormSpec
from .aten_attention import attention, attention_backward

__all__ = [
    "activation", "activation_backward", "add_norm", "attention", "attention_backward", "dropout", "dropout_add", "fused_mlp", "name",
    "norm", "norm_backward", "rotate",
]

name = "aten"
fused_mlp: FusedMlp | None = None
_aten = torch.ops.aten


_CHUNK_ELEMENTS = {"cpu": 1 << 18, "other": 1 << 26}
"""Elements of rows that are worked on at a time. On a 2-core CPU, at dim 512 and 1024 tokens, a step of 8 blocks took 4 % longer
with 2^16."""
_MOST_CHUNKS = 64


def _wide(x: Tensor) -> Tensor:
    return x.to(widened(x.dtype))


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, x.size(-1))
    normalise = _Normalise(rows, weight, bias, spec, x.dtype)
    for span in _spans(rows):
        normalise(span, rows[span])
    return normalise.y.view(x.shape), normalise.stats


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, dropout: Dropout | None,
    *, into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, residual_rows = (t.reshape(-1, x.size(-1)) for t in (x, residual))
    total = torch.empty_like(residual_rows, memory_format=torch.contiguous_format) if into is None else into.view(residual_rows.shape)
    normalise = _Normalise(total, weight, bias, spec, x.dtype)
    for span in _spans(rows):
        sums = torch.add(residual_rows[span], _dropped(rows[span], dropout, span), out=total[span])
        normalise(span, sums)
    return total.view(residual.shape), normalise.y.view(x.shape), normalise.stats


class _Normalise:
    """The norm of rows, y in `dtype` and the statistics, by slices of them."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, dtype: torch.dtype) -> None:
        wide = widened(rows.dtype)
        self._spec = spec
        self._scale, self._shift = _scale(weight, spec, wide), None if bias is None else bias.to(wide)
        self.y = torch.empty_like(rows, dtype=dtype, memory_format=torch.contiguous_format)
        self.stats = rows.new_empty(rows.size(0), 2 if spec.kind == "layer" else 1, dtype=wide)

    def __call__(self, span: slice, rows: Tensor) -> None:
        part, y, stats = rows.to(self._scale.dtype), self.y[span], self.stats[span]
        if self._spec.kind == "layer":
            normed, *statistics = _aten.native_layer_norm(part, [part.size(1)], self._scale, self._shift, self._spec.eps)
            y.copy_(normed)
            torch.cat(statistics, 1, out=stats)
            return
        mean_square = torch.linalg.vector_norm(part, dim=1, keepdim=True).square_().div_(part.size(1))
        rstd = torch.rsqrt(mean_square.add_(self._spec.eps), out=stats)
        normed = torch.mul(part, rstd, out=y if y.dtype == part.dtype else None).mul_(self._scale)
        if self._shift is not None:
            normed += self._shift
        if y.dtype != part.dtype:
            y.copy_(normed)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, spec: NormSpec, *, params: bool,
    onto: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # RMSNorm, with g = grad * weight and x^ = x * rstd:  dx = rstd * (g - x^ * mean(g * x^)),  dweight = sum(grad * x^).
    rows, grad_rows = (t.reshape(-1, x.size(-1)) for t in (x, grad))
    onto_rows = None if onto is None else onto.reshape(-1, x.size(-1))
    grad_x = torch.empty_like(rows, memory_format=torch.contiguous_format)
    wide = widened(x.dtype)
    scale, shift = _scale(weight, spec, wide), None if bias is None else bias.to(wide)
    grad_weight = torch.zeros_like(scale) if params else None
    grad_bias = torch.zeros_like(shift) if params and shift is not None else None
    for span in _spans(rows):
        part, grad_part = rows[span].to(wide), grad_rows[span].to(wide)
        if spec.kind == "layer":
            mean, rstd = stats[span].split(1, 1)
            mask = [True, params, params and bias is not None]
            grad_x_part, weight_part, bias_part = _aten.native_layer_norm_backward(
                grad_part, part, [part.size(1)], mean.contiguous(), rstd.contiguous(), scale, shift, mask
            )
        else:
            normed = part * stats[span]
            product = grad_part * normed
            weight_part = product.sum(0) if params else None
            bias_part = grad_part.sum(0) if grad_bias is not None else None
            inner = torch.mv(product, scale).div_(part.size(1)).unsqueeze(1)
            scaled = torch.mul(grad_part, scale, out=product)
            grad_x_part = scaled.addcmul_(normed, inner, value=-1).mul_(stats[span])
        grad_x[span] = grad_x_part if onto_rows is None else grad_x_part.add_(onto_rows[span])
        for total, addend in ((grad_weight, weight_part), (grad_bias, bias_part)):
            if total is not None:
                total += addend
    grads = ((grad_weight, weight), (grad_bias, bias))
    return grad_x.view(x.shape), *(None if g is None else g.to(p.dtype) for g, p in grads)  # type: ignore[union-attr, return-value]


def _spans(rows: Tensor) -> Iterator[slice]:
    """Slices of rows `[N, C]`, so small that their temporaries stay in a CPU's cache, but at most _MOST_CHUNKS."""
    return _spans_of(rows.size(0), rows.size(1), rows.device)


def _spans_of(count: int, width: int, device: torch.device) -> Iterator[slice]:
    elements = _CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "other"]
    size = max(1, elements // max(1, width), -(-count // _MOST_CHUNKS))
    if 0 < count <= size:  # without a range, which makes a compiler compile again for each count
        return iter((slice(0, count),))
    return (slice(start, start + size) for start in range(0, count, size))


def _scale(weight: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    scale = weight.to(dtype)
    return scale + spec.offset if spec.offset else scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    batch, heads, length, dim = x.shape
    half = cos.size(-1)
    cos, sin = (t.expand(-1, length, half).unsqueeze(1) if t.dim() == 3 else t for t in (cos, sin))
    out = x.new_empty(batch, length, heads, dim).transpose(1, 2)
    sign = -1 if inverse else 1
    for span in _spans_of(length, batch * heads * dim, x.device):
        part, place = x[:, :, span], out[:, :, span]
        cos_part, sin_part = (t[..., span, :].to(widened(x.dtype)) for t in (cos, sin))
        first, second = _wide(part[..., :half]), _wide(part[..., half : 2 * half])
        place[..., :half] = (first * cos_part).addcmul_(second, sin_part, value=-sign)
        place[..., half : 2 * half] = (second * cos_part).addcmul_(first, sin_part, value=sign)
        place[..., 2 * half :] = part[..., 2 * half :]
    return out


def activation(
    gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
) -> Tensor:
    hidden = up if overwrite else torch.empty_like(up)
    for span in _spans(up):
        if gate is None:
            _activate(up[span], pointwise, out=hidden[span])
        else:
            torch.mul(_activate(gate[span], pointwise), up[span], out=hidden[span])
        if dropout is not None:
            hidden[span] = _dropped(hidden[span], dropout, span)
    return hidden


def activation_backward(
    grad: Tensor, gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    # Each element is read before its place is written to: act lies where the gradient of gate will.
    grad_gate, grad_up, hidden = (gate, grad, up) if overwrite else (_empty_like(gate), torch.empty_like(up), torch.empty_like(up))
    for span in _spans(up):
        grad_part, up_part = _dropped(grad[span], dropout, span), up[span]
        if gate is None or grad_gate is None:
            _derivative(grad_part, up_part, pointwise, out=grad_up[span])
            _activate(up_part, pointwise, out=hidden[span])
        else:
            through_gate = grad_part * up_part
            _derivative(through_gate, gate[span], pointwise, out=through_gate)
            act = _activate(gate[span], pointwise, out=grad_gate[span])
            torch.mul(act, grad_part, out=grad_up[span])
            torch.mul(act, up_part, out=hidden[span])
            grad_gate[span] = through_gate
        if dropout is not None:
            hidden[span] = _dropped(hidden[span], dropout, span)
    return grad_gate, grad_up, hidden


def _dropped(x: Tensor, dropout: Dropout | None, span: slice) -> Tensor:
    return x if dropout is None else rng.dropout(x, dropout.rows_from(span.start))


def _empty_like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x)


def _activate(x: Tensor, pointwise: str, *, out: Tensor | None = None) -> Tensor:
    """A new tensor, which the caller may write to, or `out`, which may be x."""
    out = torch.empty_like(x) if out is None else out
    match pointwise:
        case "silu":
            return _aten.silu(x, out=out)
        case "gelu":
            return _aten.gelu(x, out=out)
        case "gelu_tanh":
            return _aten.gelu(x, approximate="tanh", out=out)
        case "relu":
            return torch.clamp(x, min=0, out=out)
        case _:
            return torch.clamp(x, min=0, out=out).square_()


def _derivative(grad: Tensor, x: Tensor, pointwise: str, *, out: Tensor) -> None:
    """`grad * f'(x)`; `out` may be either of the two."""
    match pointwise:
        case "silu":
            _aten.silu_backward(grad, x, grad_input=out)
        case "gelu":
            _aten.gelu_backward(grad, x, grad_input=out)
        case "gelu_tanh":
            _aten.gelu_backward(grad, x, approximate="tanh", grad_input=out)
        case "relu":
            _aten.threshold_backward(grad, x, 0, grad_input=out)
        case _:
            torch.mul(_aten.relu(x).mul_(2), grad, out=out)


def dropout(x: Tensor, dropout: Dropout) -> Tensor:
    return rng.dropout(x, dropout)


def dropout_add(x: Tensor, residual: Tensor, dropout: Dropout | None) -> Tensor:
    return (residual + (x if dropout is None else rng.dropout(x, dropout))).to(residual.dtype)
