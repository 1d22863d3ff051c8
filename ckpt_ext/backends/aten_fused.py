"""A chunk of attention by PyTorch's fused CPU kernel, which keeps a block of scores per thread.

What the kernel takes, as found in 2.13: fewer key heads than query heads; an additive mask `[B or 1, H or 1, Tq or 1, Tk or 1]`, whose
elements along the keys lie side by side, of the dtype that it computes in (another dtype is read wrongly for float64); causality beside
the mask, from the first query and key, which lets it skip blocks. Of a row that is wholly masked it makes zeros, and 0 for the
log-sum-exp. It masks causally by -inf before it scales, so it is right for positive scales only.
"""

import torch
from torch import Tensor

from ..scoring import Scoring
from ..validate import widened
from .aten_chunks import Chunk, mask_shape

_aten = torch.ops.aten


def fits(q: Tensor, scoring: Scoring) -> bool:
    """Whether the kernel computes what `scoring` asks for."""
    return q.device.type == "cpu" and scoring.dropout is None and scoring.softcap is None and scoring.scale > 0


def forward(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the chunk `q [b, h, rows, D]`, `k` and `v [b, kv, keys, D]`, without sinks; -inf for lse of a row without keys."""
    causal = scoring.mask.causal and chunk.at_origin
    hidden = _hidden(chunk, scoring, q)
    q, k, v = map(_dense_rows, (q, k, v))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_additive(hidden, q), scale=scoring.scale
    )
    if hidden is not None:
        lse.masked_fill_(_blind(hidden, causal, q.size(2)), -torch.inf)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chunk: Chunk, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the chunk's q, k and v; `lse` is +inf for a row without keys, which makes its weights zeros."""
    causal = scoring.mask.causal and chunk.at_origin
    mask = _additive(_hidden(chunk, scoring, q), q)
    grad, q, k, v, out = map(_dense_rows, (grad, q, k, v, out))
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scoring.scale
    )


def _hidden(chunk: Chunk, scoring: Scoring, q: Tensor) -> Tensor | None:
    """What the kernel gets as a mask: all of it, but not causality where the rest is the same for all rows, and so one row in memory."""
    mask = scoring.mask
    rows_alike = chunk.at_origin and mask_shape(mask, *chunk.whole[2:])[2] == 1
    return chunk.hidden(mask, q.device, causal=mask.causal and not rows_alike)


def _additive(hidden: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as the kernel takes it."""
    if hidden is None:
        return None
    return torch.zeros(hidden.shape, dtype=widened(q.dtype), device=q.device).masked_fill_(hidden, -torch.inf)


def _blind(hidden: Tensor, causal: bool, rows: int) -> Tensor:
    """Which of the rows see no key, `[b or 1, h or 1, rows or 1]`."""
    if not causal or hidden.size(2) > 1:
        return hidden.all(-1)
    last_seen = torch.arange(rows, device=hidden.device).clamp_(max=hidden.size(3) - 1)
    return hidden[:, :, 0].cummin(-1).values[..., last_seen]


def _dense_rows(x: Tensor) -> Tensor:
    """x with each row's elements side by side and no row on top of another, which the kernel takes for granted."""
    return x if x.stride(-1) == 1 and (x.size(2) == 1 or x.stride(2) >= x.size(3)) else x.contiguous()
