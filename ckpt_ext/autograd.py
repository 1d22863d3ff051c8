"""Autograd Functions: a block that keeps its input and rebuilds its internals half by half, and the operations on their own.

What `BlockFunction` keeps:

    tensor            bytes a token                      save="input"   "attention"   "all"
    ----------------------------------------------------------------------------------------
    x                 dim * itemsize                     saved          saved         saved
                                                         (or in host memory)
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
    down(hidden)      dim * itemsize                     never needed again, but by a norm over it (below)
    parameters        -                                  saved as inputs of the Function, not copied
    raw q, k          (heads + kv_heads) * head_dim      recomputed     recomputed    saved
                      * itemsize, where they have a norm
    qk statistics     4 a row of q and of k              recomputed     recomputed    saved
                      (LayerNorm: 8)
    cos, sin          rope_dim * 4                       saved, one table for all blocks
    mask              8 (segments), heads * T (dense)    saved, one for all blocks

A fused MLP (`ckpt_ext.fused_mlp`) makes no normed rows, and so saves the attention half's alone. Elsewhere than in a plain pre-norm block
(`BlockSpec.norm_placement`) there is for save="all", of each half, also what a norm behind it is taken of, dim * itemsize, and its
statistics, which are else recomputed, with the projection before it; no normed rows nor statistics where a branch takes rows without a
norm; and in a `parallel` block no mid residual, nor is the attention half's last projection run again.

Of a block that is cut across ranks (`ckpt_ext.tensor_parallel`) each has its share of q, k, v, attention out, log-sum-exp, gate, up and
hidden. Where it is a plain pre-norm block, "input" and "attention" save the attention half's branch, too, dim * itemsize.

itemsize is that of the branches; the log-sum-exp and the statistics are float32 (float64 in a float64 block). The three modes run the same
operations on the same values, so their gradients are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import mlp_half
from .backends import Backend, NormSpec
from .call import BlockCall, Shared, flat
from .fused_mlp import fused_hidden
from .gradients import GradientSums
from .guards import differentiable_once, own, without_autocast
from .masks import AttentionMask, full_mask
from .offload import park, saved_by
from .projections import Dense, Projection
from .recomputed import check_drawn, drawn
from .rng import Dropout, Site
from .run import differentiate_block, run_block
from .scoring import Scoring
from .segments import Place
from .spec import pointwise

_SHARED = len(Shared._fields)


class BlockFunction(torch.autograd.Function):
    """`y = apply(call, place, x, *shared, *tensors)`; `call.layout` tells what the parameters `tensors` are.

    `place` is the block's in a segment, or None: behind the first block of a segment x is not saved, but made again when it is needed;
    where `call.offload` it waits in the host's memory.

    Every parameter is an input, so its gradient is returned, once; a change in place between forward and backward is detected; and y
    requires grad when any of them does. Double backward raises RuntimeError.
    """

    @staticmethod
    def forward(ctx, call: BlockCall, place: Place | None, x: Tensor, *inputs) -> Tensor:
        shared, tensors = Shared(*inputs[:_SHARED]), inputs[_SHARED:]
        with without_autocast(x):
            y, kept = run_block(call, call.layout.bind(tensors), x, shared)
        keeps_input = place is None or place.is_first
        ctx.call, ctx.place, ctx.drawn = call, place, drawn(shared.state)
        ctx.parked = park(x) if keeps_input and call.offload else None
        ctx.has_saved_input = keeps_input and ctx.parked is None
        ctx.save_for_backward(x if ctx.has_saved_input else None, *inputs, *kept)
        if place is not None:
            place.segment.join(ctx, call, inputs)
        return own(y)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_y: Tensor):
        call: BlockCall = ctx.call
        _, _, needs_x, *needs_inputs = ctx.needs_input_grad
        x, *rest = saved_by(ctx) if ctx.place is None else ctx.place.saved_tensors(ctx)
        inputs, kept = rest[: len(needs_inputs)], rest[len(needs_inputs) :]
        del rest
        shared, tensors, needs_tensors = Shared(*inputs[:_SHARED]), inputs[_SHARED:], needs_inputs[_SHARED:]
        check_drawn(ctx, shared.state)
        weights, needs = call.layout.bind(tensors), call.layout.split(needs_tensors)
        with without_autocast(x):
            grad_x, grads = differentiate_block(call, weights, needs, needs_x, grad_y, x, kept, shared)
        return None, None, grad_x, *[None] * _SHARED, *call.layout.join(grads)


class AttentionCall(NamedTuple):
    """The static arguments of an attention."""

    backend: Backend
    causal: bool
    window: int | None
    scale: float
    softcap: float | None
    p: float

    def scoring(self, q: Tensor, k: Tensor, sinks: Tensor | None, state: Tensor | None, mask: Sequence[Tensor | None]) -> Scoring:
        """How scores become weights, with `mask` the fields of an `AttentionMask`."""
        shape = (*q.shape[:3], k.size(2))
        whole = full_mask(AttentionMask(*mask), causal=self.causal, window=self.window, shape=shape, device=q.device)
        return Scoring(whole, self.scale, self.softcap, sinks, _dropout(state, self.p))


class AttentionFunction(torch.autograd.Function):
    """`out = apply(call, q, k, v, sinks, state, *mask data)`; keeps q, k, v, out and the log-sum-exp (arXiv:2307.08691)."""

    @staticmethod
    def forward(ctx, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks, state, *mask) -> Tensor:
        ctx.call, ctx.drawn = call, drawn(state)
        with without_autocast(q):
            out, lse = call.backend.attention(q, k, v, call.scoring(q, k, sinks, state, mask))
        ctx.save_for_backward(q, k, v, out, lse, sinks, state, *mask)
        return own(out)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, lse, sinks, state, *mask = ctx.saved_tensors
        check_drawn(ctx, state)
        call: AttentionCall = ctx.call
        with without_autocast(q):
            *grads, grad_sinks = call.backend.attention_backward(grad_out, q, k, v, out, lse, call.scoring(q, k, sinks, state, mask))
        return None, *grads, None if grad_sinks is None else grad_sinks.to(sinks.dtype), None, *[None] * len(mask)


class MlpCall(NamedTuple):
    """The static arguments of an MLP."""

    backend: Backend
    activation: str
    p: float


class _Mlp(NamedTuple):
    gate: Projection | None
    up: Projection
    down: Projection


class MlpFunction(torch.autograd.Function):
    """`y = apply(call, x, w_gate, w_up, w_down, state)`; keeps x, and runs gate and up again, but not down."""

    @staticmethod
    def forward(ctx, call: MlpCall, x: Tensor, w_gate, w_up: Tensor, w_down: Tensor, state) -> Tensor:
        ctx.call, ctx.drawn = call, drawn(state)
        ctx.save_for_backward(x, w_gate, w_up, w_down, state)
        with without_autocast(x):
            mlp, rows, dropout, f = _mlp(w_gate, w_up, w_down), flat(x), _dropout(state, call.p), pointwise(call.activation)
            fused = fused_hidden(call.backend, mlp.gate, mlp.up, f, x.dtype, x.device)
            if fused is None:
                hidden = call.backend.activation(None if mlp.gate is None else mlp.gate(rows), mlp.up(rows), f, dropout)
            else:
                hidden, _ = fused.forward(rows, None, dropout, keep=False)
            return own(mlp.down(hidden).view(*x.shape[:-1], w_down.size(0)))

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_y: Tensor):
        x, w_gate, w_up, w_down, state = ctx.saved_tensors
        check_drawn(ctx, state)
        call: MlpCall = ctx.call
        _, needs_x, *needs, _ = ctx.needs_input_grad
        parts = ("gate", "up", "down")
        with without_autocast(x):
            mlp, rows, dropout, f = _mlp(w_gate, w_up, w_down), flat(x), _dropout(state, call.p), pointwise(call.activation)
            fused = fused_hidden(call.backend, mlp.gate, mlp.up, f, x.dtype, x.device)

            def differentiate(grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
                if fused is not None:
                    return fused.backward(grad, rows, None, dropout)
                gate, up = None if mlp.gate is None else mlp.gate(rows), mlp.up(rows)
                return call.backend.activation_backward(grad, gate, up, f, dropout, overwrite=True)

            sums = GradientSums(1)
            grad_x = mlp_half.through_mlp(
                mlp, {part: (need, False) for part, need in zip(parts, needs, strict=True)}, needs_x, flat(grad_y), sums,
                differentiate=differentiate, rows=lambda: rows,
            )  # fmt: skip
            grads = sums.finish(mlp)
        grad_weights = (grads[part][0] if part in grads else None for part in parts)
        return None, None if grad_x is None else grad_x.view(x.shape), *grad_weights, None


def _mlp(w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> _Mlp:
    return _Mlp(None if w_gate is None else Dense(w_gate), Dense(w_up), Dense(w_down))


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
