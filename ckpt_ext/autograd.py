"""Autograd Functions: a block that keeps its input and rebuilds its internals half by half, and the operations on their own.

What `BlockFunction` keeps:

    tensor            bytes a token                      save="input"   "attention"   "all"
    ----------------------------------------------------------------------------------------
    x                 dim * itemsize                     saved          saved         saved
    RNG state         16 a block, if dropout is on       saved          saved         saved
    attention out     heads * head_dim * itemsize        recomputed     saved         saved
    log-sum-exp       heads * 4                          recomputed     saved         saved
    normed rows, x2   2 * dim * itemsize                 recomputed     recomputed    saved
    norm statistics   2 * 4 (LayerNorm: 4 * 4)           recomputed     recomputed    saved
    q, k, v           (heads + 2 kv_heads) * head_dim    recomputed     recomputed    saved
                      * itemsize
    mid residual      dim * itemsize                     recomputed     recomputed    saved
    gate, up          2 * hidden_dim * itemsize          recomputed     recomputed    saved
                      (plain MLP: 1 *)
    hidden            hidden_dim * itemsize              made again inside the activation's backward kernel
    P, scores         heads * T * itemsize               made again inside the attention's backward kernel
    down(hidden)      dim * itemsize                     never needed again
    parameters        -                                  saved as inputs of the Function, not copied
    cos, sin          rope_dim * 4                       saved, one table for all blocks

itemsize is that of the branches; the log-sum-exp and the statistics are float32 (float64 in a float64 block). The three modes run the same
operations on the same values, so their gradients are equal bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import attention_half, mlp_half
from .backends import Backend, NormSpec
from .call import BlockCall, flat
from .gradients import GradientSums
from .guards import differentiable_once, own, without_autocast
from .projections import Dense, Projection
from .rng import Dropout, Site
from .sites import block_dropout
from .spec import pointwise
from .weights import BlockWeights


def run_block(
    call: BlockCall, weights: BlockWeights, x: Tensor, cos: Tensor | None, sin: Tensor | None, state: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The block's output, and what `call.save` keeps besides the inputs: internals of the attention half, then the rest for "all"."""
    table = None if cos is None or sin is None else (cos, sin)
    dropout = block_dropout(call.spec, state)
    mid, internals = attention_half.forward(call, weights, x, table, dropout, kept={})
    # What backward rebuilds is dropped before the MLP half makes its own.
    kept = list(map(internals.__getitem__, _KEPT[call.save]))
    del internals
    y, slices = mlp_half.forward(call, weights, mid, dropout)
    if call.save == "all":
        kept += [mid, *(tensor for internals in slices for tensor in internals.values())]
    return y, kept


_KEPT = {"input": (), "attention": ("out", "lse"), "all": attention_half.INTERNALS}
"""Which internals of the attention half are kept."""


class BlockFunction(torch.autograd.Function):
    """`y = apply(call, x, cos, sin, state, *tensors)`; `call.layout` tells what the parameters `tensors` are.

    Every parameter is an input, so its gradient is returned, once; a change in place between forward and backward is detected; and y
    requires grad when any of them does. Double backward raises RuntimeError.
    """

    @staticmethod
    def forward(ctx, call: BlockCall, x: Tensor, cos, sin, state, *tensors) -> Tensor:
        with without_autocast(x):
            y, kept = run_block(call, call.layout.bind(tensors), x, cos, sin, state)
        ctx.call = call
        ctx.save_for_backward(x, cos, sin, state, *tensors, *kept)
        return own(y)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_y: Tensor):
        call: BlockCall = ctx.call
        _, needs_x, _, _, _, *needs_tensors = ctx.needs_input_grad
        x, cos, sin, state, *rest = ctx.saved_tensors
        tensors, kept = rest[: len(needs_tensors)], rest[len(needs_tensors) :]
        del rest
        weights, needs = call.layout.bind(tensors), call.layout.split(needs_tensors)
        needs_mid = needs_x or any(any(needs[part]) for part in attention_half.PARTS)
        table = None if cos is None else (cos, sin)
        dropout = block_dropout(call.spec, state)

        with without_autocast(x):
            internals = dict(zip(_KEPT[call.save], kept, strict=False))
            slices: list[dict[str, Tensor]] = []
            if call.save == "all":
                mid, *kept = kept[len(internals) :]
                slices = mlp_half.unpack(kept, gated=weights.gate is not None)
            else:
                mid, internals = attention_half.forward(call, weights, x, table, dropout, kept=internals)
            grad_mid, grads = mlp_half.backward(call, weights, needs, needs_mid, grad_y, mid, slices, dropout)
            del mid
            grad_x = None
            if grad_mid is not None:
                grad_x, attention_grads = attention_half.backward(
                    call, weights, needs, needs_x, grad_mid, x, internals, table, dropout
                )
                grads |= attention_grads
        return None, grad_x, None, None, None, *call.layout.join(grads)


class AttentionFunction(torch.autograd.Function):
    """`out = apply(backend, causal, scale, p, q, k, v, state)`; keeps q, k, v, out and the log-sum-exp (arXiv:2307.08691)."""

    @staticmethod
    def forward(ctx, backend: Backend, causal: bool, scale: float, p: float, q: Tensor, k: Tensor, v: Tensor, state) -> Tensor:
        ctx.backend, ctx.causal, ctx.scale, ctx.p = backend, causal, scale, p
        with without_autocast(q):
            out, lse = backend.attention(q, k, v, causal=causal, scale=scale, dropout=_dropout(state, p))
        ctx.save_for_backward(q, k, v, out, lse, state)
        return own(out)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, lse, state = ctx.saved_tensors
        with without_autocast(q):
            grads = ctx.backend.attention_backward(
                grad_out, q, k, v, out, lse, causal=ctx.causal, scale=ctx.scale, dropout=_dropout(state, ctx.p)
            )
        return None, None, None, None, *grads, None


class _Mlp(NamedTuple):
    gate: Projection | None
    up: Projection
    down: Projection


class MlpFunction(torch.autograd.Function):
    """`y = apply(backend, activation, p, x, w_gate, w_up, w_down, state)`; keeps x, and runs gate and up again, but not down."""

    @staticmethod
    def forward(ctx, backend: Backend, activation: str, p: float, x: Tensor, w_gate, w_up: Tensor, w_down: Tensor, state) -> Tensor:
        ctx.backend, ctx.activation, ctx.p = backend, activation, p
        ctx.save_for_backward(x, w_gate, w_up, w_down, state)
        with without_autocast(x):
            mlp, internals = _mlp_internals(x, w_gate, w_up, w_down)
            hidden = backend.activation(internals.get("gate"), internals["up"], pointwise(activation), _dropout(state, p))
            return own(mlp.down(hidden).view(*x.shape[:-1], w_down.size(0)))

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_y: Tensor):
        x, w_gate, w_up, w_down, state = ctx.saved_tensors
        _, _, _, needs_x, *needs, _ = ctx.needs_input_grad
        parts = ("gate", "up", "down")
        with without_autocast(x):
            mlp, internals = _mlp_internals(x, w_gate, w_up, w_down)
            sums = GradientSums(1)
            grad_x = mlp_half.through_mlp(
                ctx.backend, ctx.activation, mlp, {part: (need, False) for part, need in zip(parts, needs, strict=True)}, needs_x,
                flat(grad_y), internals, _dropout(state, ctx.p), sums, overwrite=True,
            )  # fmt: skip
            grads = sums.finish(mlp)
        grad_weights = (grads[part][0] if part in grads else None for part in parts)
        return None, None, None, None if grad_x is None else grad_x.view(x.shape), *grad_weights, None


def _mlp_internals(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> tuple[_Mlp, dict[str, Tensor]]:
    mlp = _Mlp(None if w_gate is None else Dense(w_gate), Dense(w_up), Dense(w_down))
    rows = flat(x)
    internals = {"normed": rows, "up": mlp.up(rows)}
    if mlp.gate is not None:
        internals["gate"] = mlp.gate(rows)
    return mlp, internals


class NormFunction(torch.autograd.Function):
    """`y = apply(backend, spec, x, weight, bias)`; keeps x and the rows' statistics."""

    @staticmethod
    def forward(ctx, backend: Backend, spec: NormSpec, x: Tensor, weight: Tensor, bias) -> Tensor:
        ctx.backend, ctx.spec = backend, spec
        with without_autocast(x):
            y, stats = backend.norm(x, weight, bias, spec)
        ctx.save_for_backward(x, weight, bias, stats)
        return own(y)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_y: Tensor):
        x, weight, bias, stats = ctx.saved_tensors
        _, _, _, *needs = ctx.needs_input_grad
        with without_autocast(x):
            grad_x, *grads = ctx.backend.norm_backward(grad_y, x, weight, bias, stats, ctx.spec, params=any(needs))
        return None, None, grad_x, *grads


def _dropout(state: Tensor | None, p: float) -> Dropout | None:
    return None if state is None else Dropout(state, p, Site.FUNCTIONAL)
