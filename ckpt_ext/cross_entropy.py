"""The loss of a language model's head without its logits: `cross_entropy(cap(x W^T + b), target)`, a tile of logits at a time.

Per token, over logits z of V symbols, with target t, smoothing e and z-loss factor c (arXiv:2204.02311, section 5):

    loss  = lse - (1 - e) z_t - e mean(z) + c lse^2                 lse = log sum exp z
    dz_v  = (1 + 2 c lse) exp(z_v - lse) - (1 - e) [v = t] - e / V
    z     = cap tanh(u / cap),   du = dz (1 - (z / cap)^2)          where there is a softcap

Forward walks over tiles with a running maximum and sum per token; backward makes each tile's logits again. Stored between them: x, W, b and
target, which are inputs, and lse, 4 bytes a token. Not stored: logits, probabilities, and no gradient before there is one of the loss.

A tile's share of dx is a sum over symbols, and its share of dW one over tokens. One of the two is walked over in the inner loop and needs a
sum for one slice alone; the sum that outlives the inner loop is the smaller one. Sums are in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .guards import differentiable_once, without_autocast
from .projections import product
from .slicing import spans
from .validate import widened

_TILE_BYTES = {"cpu": 8 << 20, "other": 256 << 20}
"""Bytes of a tile of logits in float32."""
_LEAST_SIDE = 1024
"""Tokens or symbols of a tile at the least: narrower products read their other operand more often than they pay for."""


class Loss(NamedTuple):
    """The static arguments of a loss."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    reduction: str = "mean"
    divide: Callable[[int, int], Iterable[slice]] = spans
    """Which slices of so many rows, each of so many, are walked over: all of them, but for who only counts what a walk takes."""


class LinearCrossEntropyFunction(torch.autograd.Function):
    """`loss = apply(call, x [N, dim], weight [V, dim], bias [V] or None, target [N])`; keeps its inputs and 4 bytes a token."""

    @staticmethod
    def forward(ctx, call: Loss, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        with without_autocast(x):
            lse, picked, mean = _statistics(call, x, weight, bias, target)
        smooth = call.label_smoothing
        losses = lse - (1 - smooth) * picked - smooth * mean
        if call.z_loss:  # the square may overflow where the loss does not
            losses += call.z_loss * lse.square()
        valid = target != call.ignore_index
        losses = torch.where(valid, losses, 0.0)
        ctx.call = call
        ctx.save_for_backward(x, weight, bias, target, lse)
        if call.reduction == "none":
            return losses
        return losses.sum() if call.reduction == "sum" else losses.sum() / valid.sum()

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_loss: Tensor):
        x, weight, bias, target, lse = ctx.saved_tensors
        call: Loss = ctx.call
        valid = target != call.ignore_index
        if call.reduction == "mean":
            grad_loss = grad_loss / valid.sum()
        grad_losses = torch.where(valid, grad_loss, 0.0).to(lse.dtype)
        with without_autocast(x):
            grads = _gradients(call, grad_losses, x, weight, bias, target, lse, ctx.needs_input_grad[1:4])
        return None, *grads, None


class _Tile(NamedTuple):
    rows: slice
    symbols: slice


def _sides(tokens: int, symbols: int, device: torch.device) -> tuple[int, int]:
    """Tokens and symbols of a tile: as near to square as the least side and the size allow."""
    elements = _TILE_BYTES["cpu" if device.type == "cpu" else "other"] // 4
    rows = max(1, min(tokens, _LEAST_SIDE, elements))
    columns = max(1, min(symbols, max(elements // rows, _LEAST_SIDE)))
    return max(rows, min(tokens, elements // columns)), columns


def _logits(call: Loss, x: Tensor, weight: Tensor, bias: Tensor | None, tile: _Tile, wide: torch.dtype) -> Tensor:
    """A tile of logits, `[rows, symbols]`, capped, in `wide`; they are rounded to x's dtype first, as a whole matrix of them would be."""
    part = None if bias is None else bias[tile.symbols].to(x.dtype)
    logits = torch.nn.functional.linear(x[tile.rows], weight[tile.symbols].to(x.dtype), part).to(wide)
    return logits if call.softcap is None else logits.div_(call.softcap).tanh_().mul_(call.softcap)


def _statistics(call: Loss, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lse, the target's logit and the mean logit of each token; the mean is left out, 0, where nothing is smoothed."""
    wide = widened(x.dtype)
    tokens, symbols = x.size(0), weight.size(0)
    known = (target == call.ignore_index) | ((target >= 0) & (target < symbols))
    torch._assert_async(known.all(), f"target must be ignore_index={call.ignore_index} or in [0, {symbols})")
    most, total = (x.new_full((tokens,), value, dtype=wide) for value in (-torch.inf, 0.0))
    picked, mean = x.new_zeros(tokens, dtype=wide), x.new_zeros(tokens, dtype=wide)
    height, width = _sides(tokens, symbols, x.device)
    for rows in call.divide(tokens, height):
        for columns in call.divide(symbols, width):
            logits = _logits(call, x, weight, bias, _Tile(rows, columns), wide)
            place, inside = _within(target[rows].long(), columns)
            picked[rows] += torch.where(inside, logits.gather(1, place)[:, 0], 0.0)
            if call.label_smoothing:
                mean[rows] += logits.sum(1) / symbols
            largest = torch.maximum(most[rows], logits.amax(1))
            shift = largest.masked_fill(largest == -torch.inf, 0)  # -inf - -inf would be NaN
            total[rows] = total[rows] * (most[rows] - shift).exp_() + logits.sub_(shift[:, None]).exp_().sum(1)
            most[rows] = largest
    return total.log_().add_(most), picked, mean


def _within(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Where in a tile's columns the target of each row is, `[rows, 1]`, and whether it is there; 0 where it is not."""
    place = target - columns.start
    inside = (place >= 0) & (target < columns.stop)
    return torch.where(inside, place, 0)[:, None], inside


def _gradients(
    call: Loss, grad_losses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias where `needs` says so, each in its tensor's dtype."""
    needs_x, needs_weight, needs_bias = needs
    height, width = _sides(x.size(0), weight.size(0), x.device)
    symbols_outside = needs_weight and (not needs_x or x.size(0) <= weight.size(0))
    outer, inner = (_Stripes(call, weight, width, needs_weight), _Stripes(call, x, height, needs_x))
    if not symbols_outside:
        outer, inner = inner, outer
    grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if needs_bias and bias is not None else None
    grad_outer = torch.empty_like(outer.tensor) if outer.needed else None
    grad_inner = inner.zeros(lse.dtype, more_than_one=len(outer.places) > 1) if inner.needed else None
    for outer_place in outer.places:
        grad_stripe = outer.zeros(lse.dtype, more_than_one=len(inner.places) > 1, place=outer_place) if outer.needed else None
        for inner_place in inner.places:
            tile = _Tile(inner_place, outer_place) if symbols_outside else _Tile(outer_place, inner_place)
            grad = _grad_logits(call, grad_losses, x, weight, bias, target, lse, tile)
            if grad_bias is not None:
                grad_bias[tile.symbols] += grad.sum(0)
            grad = grad.to(x.dtype)
            across = grad.T if symbols_outside else grad  # [outer, inner]
            if grad_stripe is not None:
                product(across, inner.tensor[inner_place].to(x.dtype), grad_stripe)
            if grad_inner is not None:
                product(across.T, outer.tensor[outer_place].to(x.dtype), grad_inner[inner_place])
        if grad_outer is not None and grad_stripe is not None:
            grad_outer[outer_place] = grad_stripe
    grad_x, grad_weight = (grad_inner, grad_outer) if symbols_outside else (grad_outer, grad_inner)
    return (
        None if grad_x is None else grad_x.to(x.dtype),
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


class _Stripes:
    """The rows of x or of W, in slices of a tile's side."""

    def __init__(self, call: Loss, tensor: Tensor, side: int, needed: bool) -> None:
        self.tensor, self.needed = tensor, needed
        self.places = list(call.divide(tensor.size(0), side))

    def zeros(self, wide: torch.dtype, *, more_than_one: bool, place: slice = slice(None)) -> Tensor:
        """Zeros in the shape of the rows at `place`, in `wide` where they are to hold a sum of more than one product."""
        return torch.zeros_like(self.tensor[place], dtype=wide if more_than_one else None, memory_format=torch.contiguous_format)


def _grad_logits(
    call: Loss, grad_losses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, tile: _Tile
) -> Tensor:
    """Gradient of a tile of logits before their cap, `[rows, symbols]`."""
    logits = _logits(call, x, weight, bias, tile, lse.dtype)
    slope = None if call.softcap is None else 1 - (logits / call.softcap).square_()
    grad_rows, lse_rows = grad_losses[tile.rows], lse[tile.rows]
    grad = logits.sub_(lse_rows[:, None]).exp_().mul_((grad_rows * (1 + 2 * call.z_loss * lse_rows))[:, None])
    if call.label_smoothing:
        grad.sub_((grad_rows * (call.label_smoothing / weight.size(0)))[:, None])
    place, inside = _within(target[tile.rows].long(), tile.symbols)
    grad.scatter_add_(1, place, torch.where(inside, grad_rows * (call.label_smoothing - 1), 0.0)[:, None])
    return grad if slope is None else grad.mul_(slope)
