"""The engine's operations as functions: a whole block, attention, an MLP, a norm. Inputs are checked here, once."""

from __future__ import annotations

import torch
from torch import Tensor

from . import recomputed, rope
from .autograd import AttentionCall, AttentionFunction, BlockFunction, MlpCall, MlpFunction, NormFunction, run_block
from .backends import NormSpec, select
from .call import BlockCall, Shared
from .cross_entropy import LinearCrossEntropyFunction, Loss
from .guards import without_autocast
from .masks import AttentionMask, attention_mask, full_mask
from .projections import InCall, Projection
from .rng import Dropout, Site
from .segments import Place
from .sites import PROJECTIONS, drops
from .slicing import slicing
from .spec import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, BackendName, BlockSpec, Policy, is_gated
from .validate import bound, computable, instance, integer, is_integer, number, one_of, probability, score_scale, window_size
from .weights import BlockWeights


def block(
    x: Tensor, weights: BlockWeights, spec: BlockSpec, *, mask: AttentionMask | None = None, table: tuple[Tensor, Tensor] | None = None,
    policy: Policy | None = None, backend: BackendName = "auto", training: bool = False, place: Place | None = None,
) -> Tensor:  # fmt: skip
    """A transformer block on `x [B, T, dim]` (float64, float32, bfloat16 or float16); y has x's shape and dtype.

    Between forward and backward it keeps what `policy` says, x alone by default. Dropout of `spec` and of adapters is drawn where
    `training`, from one state, reserved in the default generator of x's device. Under autocast the branches compute in autocast's dtype
    and the residual stream in x's. Weights may have another dtype than x; each gradient has its tensor's. `mask`, from `attention_mask`,
    adds documents, padding or a dense mask to the spec's causality and window. `table`, cosines and sines `[T, rope_dim / 2]` or
    `[B or 1, T, rope_dim / 2]` of any strides, rotates queries and keys by those angles instead of by `rope_theta`'s, which may be None; it
    gets no gradient. `place` is for `checkpoint_sequential`, which puts blocks into segments.

    Where the projections are this rank's shares of a block that is cut across ranks (`ckpt_ext.tensor_parallel`), spec and mask are the
    whole block's, and x, y and their gradients the same on all ranks.

    Raises ValueError for a wrong shape, dtype or device; RuntimeError for a backend that cannot run, ranks with other RNG states, and in
    a checkpoint that would give other gradients in silence (`ckpt_ext.recomputed`); NotImplementedError for a block that cannot be cut
    across ranks in that way.
    """
    if x.dim() != 3 or x.size(-1) != spec.dim:
        raise ValueError(f"x must have shape [B, T, {spec.dim}], got {list(x.shape)}")
    instance("policy", policy or Policy(), Policy)
    if place is not None:
        instance("place", place, Place)
    weights.check(spec)
    recomputed.check_cache()
    whole, across = spec, weights.across
    if across is not None:
        spec = across.share(spec)
    weights = _in_call(weights, x, None)
    layout, tensors = weights.flatten()
    computable("x", x, {f"weight {index}": tensor for index, tensor in enumerate(tensors)})
    policy = policy or Policy()
    call = BlockCall(
        spec, policy.save, select(backend, x.device), layout, _branch_dtype(x),
        slicing(spec, x.size(0) * x.size(1), x.device, policy.slices, _branch_dtype(x), weights, tokens_whole=across is not None),
        policy.offload, across,
    )  # fmt: skip
    full_mask(mask, causal=spec.causal, window=spec.window, shape=(x.size(0), whole.heads, x.size(1), x.size(1)), device=x.device)
    state, adapters_drop = None, training and any(part.drops for _, part in _projections(weights))
    if adapters_drop or (training and drops(spec)):
        state = recomputed.reserve(x.device)
        if across is not None:
            across.check_same(state)
    if adapters_drop:
        weights = _in_call(weights, x, state)
        tensors = weights.flatten()[1]
    if table is not None:
        rope.check(table, spec, x)
    angles = table or rope.table(spec, x.size(1), call.dtype, x.device)
    shared = Shared(*angles, state, *(mask or AttentionMask()))
    if _differentiated(x, *tensors):
        # A graph cannot hold what waits elsewhere, nor calls between ranks in a Function. The decorator would import the compiler here.
        disable = (policy.offload or across is not None) and torch.compiler.is_compiling()
        apply = torch.compiler.disable(BlockFunction.apply) if disable else BlockFunction.apply
        return apply(call, place, x, *shared, *tensors)
    with without_autocast(x):
        return run_block(call, weights, x, shared)[0]


def draws(weights: BlockWeights, spec: BlockSpec) -> bool:
    """Whether a block in training draws any mask."""
    return drops(spec) or any(part.drops for _, part in _projections(weights))


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None, cu_seqlens: Tensor | None = None, key_mask: Tensor | None = None,
    mask: Tensor | AttentionMask | None = None, scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, backend: BackendName = "auto",
) -> Tensor:  # fmt: skip
    """`drop(softmax(mask(cap(q k^T * scale)))) v` for `q [B, H, Tq, D]`, `k` and `v [B, KV, Tk, D]`, KV a divisor of H.

    The result is `[B, H, Tq, D]` in q's dtype. Keeps q, k, v, the output and its log-sum-exp for backward (arXiv:2307.08691). Under
    autocast it computes in autocast's dtype.

    Args:
        causal: query i sees keys j <= i, also if Tq != Tk, as in `scaled_dot_product_attention`.
        window: query i sees keys with |i - j| < window.
        segment_ids, cu_seqlens, key_mask, mask: documents, padding or a dense mask, see `attention_mask`; or, as `mask`, what that returns.
        scale: defaults to `D ** -0.5`.
        softcap: scores s become `softcap * tanh(s / softcap)` before the mask (arXiv:2408.00118).
        sinks: `[H]`, a logit per head that takes part in the softmax's sum and has no value (arXiv:2309.17453); differentiable.
        dropout_p: applied whenever it is above zero.

    A query that sees no key gets zeros. Raises ValueError for wrong shapes, dtypes, devices or probabilities, NotImplementedError for an
    additive mask, RuntimeError for a backend that cannot run.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        instance(name, tensor, Tensor)
    computable("q", q, {"k": k, "v": v})
    dtype = _branch_dtype(q)
    if dtype != q.dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check_attention(q, k, v)
    probability("dropout_p", dropout_p)
    window_size("window", window)
    bound("softcap", softcap)
    if scale is not None:
        score_scale("scale", scale)
    if sinks is not None:
        instance("sinks", sinks, Tensor)
        computable("q", q, {"sinks": sinks})
        if sinks.shape != q.shape[1:2]:
            raise ValueError(f"sinks must have shape [{q.size(1)}], got {list(sinks.shape)}")
    if isinstance(mask, AttentionMask):
        if not (segment_ids is None and cu_seqlens is None and key_mask is None):
            raise ValueError("mask must come alone where it is an AttentionMask, got segment_ids, cu_seqlens or key_mask beside it")
        data: AttentionMask | None = mask
    else:
        if cu_seqlens is not None and q.size(0) != 1:
            raise ValueError(f"cu_seqlens must come with a batch of one, got {q.size(0)}")
        data = attention_mask(segment_ids=segment_ids, cu_seqlens=cu_seqlens, key_mask=key_mask, mask=mask, length=q.size(2))
    full_mask(data, causal=causal, window=window, shape=(*q.shape[:3], k.size(2)), device=q.device)
    dropout = _functional_dropout(q, dropout_p)
    state = None if dropout is None else dropout.state
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)
    call = AttentionCall(select(backend, q.device), causal, window, scale, softcap, dropout_p)
    return AttentionFunction.apply(call, q, k, v, sinks, state, *(data or AttentionMask()))


def mlp(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, *, activation: str = "swiglu", dropout_p: float = 0.0,
    backend: BackendName = "auto",
) -> Tensor:
    """`drop(f(x w_gate^T) * (x w_up^T)) w_down^T`, or `drop(f(x w_up^T)) w_down^T` for a plain activation, with w_gate None.

    `x [..., dim]`, `w_gate` and `w_up [hidden, dim]`, `w_down [out, hidden]`. Keeps x alone; backward runs gate and up again, not down.

    Raises ValueError for wrong shapes, dtypes, devices, activations or probabilities, RuntimeError for a backend that cannot run.
    """
    one_of("activation", activation, (*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS))
    if is_gated(activation) != (w_gate is not None):
        raise ValueError(f"w_gate must be {'given' if is_gated(activation) else 'None'} for activation {activation!r}")
    probability("dropout_p", dropout_p)
    computable("x", x, {"w_gate": w_gate, "w_up": w_up, "w_down": w_down})
    for name, weight in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        if weight is not None and (weight.dim() != 2 or 0 in weight.shape):
            raise ValueError(f"{name} must be a matrix with elements, got shape {list(weight.shape)}")
    for name, weight, width in (("w_gate", w_gate, x.size(-1)), ("w_up", w_up, x.size(-1)), ("w_down", w_down, w_up.size(0))):
        if weight is not None and weight.size(1) != width:
            raise ValueError(f"{name} must have shape [*, {width}], got {list(weight.shape)}")
    if w_gate is not None and w_gate.shape != w_up.shape:
        raise ValueError(f"w_gate must have w_up's shape {list(w_up.shape)}, got {list(w_gate.shape)}")
    rows = x.to(_branch_dtype(x))
    dropout = _functional_dropout(x, dropout_p)
    state = None if dropout is None else dropout.state
    return MlpFunction.apply(MlpCall(select(backend, x.device), activation, dropout_p), rows, w_gate, w_up, w_down, state)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kind: str = "rms", eps: float = 1e-5, offset: float = 0.0,
    backend: BackendName = "auto",
) -> Tensor:
    """RMSNorm ("rms") or LayerNorm ("layer") of `x [..., C]` scaled by `weight [C] + offset`, shifted by `bias [C]`; x's dtype.

    Computed in float32, or float64 for float64; keeps x and the rows' statistics.

    Raises ValueError for wrong shapes, dtypes or devices, RuntimeError for a backend that cannot run.
    """
    one_of("kind", kind, ("rms", "layer"))
    number("eps", eps)
    number("offset", offset)
    instance("weight", weight, Tensor)
    computable("x", x, {"weight": weight, "bias": bias})
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape {list(x.shape[-1:])}, got {list(tensor.shape)}")
    return NormFunction.apply(select(backend, x.device), NormSpec(kind, eps, offset), x, weight, bias)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    softcap: float | None = None, z_loss: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Cross entropy of `softcap(x weight^T + bias)` against `target`, whose logits are never whole: made a tile at a time, twice.

    `x [..., dim]`, `weight [V, dim]`, `bias [V]`, `target [...]` of integers in [0, V) or `ignore_index`. The loss is float32 (float64 for
    float64): its mean over tokens that are not ignored, its "sum", or with "none" that of each token, `[...]`. `label_smoothing` is that of
    `torch.nn.functional.cross_entropy`; `softcap` bounds logits by `softcap * tanh(logit / softcap)` (arXiv:2408.00118); `z_loss` adds
    `z_loss * logsumexp ** 2` (arXiv:2204.02311). Gradients are exact: no probability is dropped for being small. Keeps its inputs, as rows,
    and 4 bytes a token. Under autocast logits are in autocast's dtype.

    Raises ValueError for wrong shapes, dtypes, devices or options, RuntimeError for a target out of range.
    """
    for name, tensor in (("x", x), ("weight", weight), ("target", target)):
        instance(name, tensor, Tensor)
    computable("x", x, {"weight": weight, "bias": bias})
    one_of("reduction", reduction, ("mean", "sum", "none"))
    probability("label_smoothing", label_smoothing)
    bound("softcap", softcap)
    number("z_loss", z_loss)
    if weight.dim() != 2 or weight.size(0) == 0 or weight.size(1) != x.size(-1):
        raise ValueError(f"weight must have shape [V, {x.size(-1)}], got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape [{weight.size(0)}], got {list(bias.shape)}")
    integer("ignore_index", ignore_index)
    if target.shape != x.shape[:-1] or not is_integer(target):
        raise ValueError(f"target must be integers of shape {list(x.shape[:-1])}, got {target.dtype} {list(target.shape)}")
    if target.device != x.device:
        raise ValueError(f"target must be on x's device {x.device}, got {target.device}")
    rows = x.to(_branch_dtype(x)).reshape(-1, x.size(-1))
    call = Loss(ignore_index, label_smoothing, softcap, z_loss, reduction)
    loss = LinearCrossEntropyFunction.apply(call, rows, weight, bias, target.reshape(-1))
    return loss.view(target.shape) if reduction == "none" else loss


def _branch_dtype(x: Tensor) -> torch.dtype:
    """What the branches compute in: autocast's dtype where it is on, else x's."""
    return _autocast_dtype(x) or x.dtype


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Autocast's dtype where it is on for x. Float64 stays, as autocast leaves it."""
    kind = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def _projections(weights: BlockWeights) -> list[tuple[str, Projection]]:
    parts = ((name, getattr(weights, name)) for name in PROJECTIONS)
    return [(name, part) for name, part in parts if part is not None]


def _in_call(weights: BlockWeights, x: Tensor, state: Tensor | None) -> BlockWeights:
    """The weights as a call of the block on x runs them, whose forward pass has reserved `state`, if any, for adapters."""
    autocast = _autocast_dtype(x)
    parts = {name: part.in_call(InCall(PROJECTIONS.index(name), state, autocast)) for name, part in _projections(weights)}
    return weights._replace(**parts)  # type: ignore[arg-type]


def _differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _functional_dropout(x: Tensor, p: float) -> Dropout | None:
    return Dropout(recomputed.reserve(x.device), p, Site.FUNCTIONAL) if p > 0 else None


def _check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape [B, H, T, D], got {list(tensor.shape)}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"v must have k's shape {list(k.shape)}, got {list(v.shape)}")
    if (k.size(0), k.size(3)) != (q.size(0), q.size(3)):
        raise ValueError(f"k must have q's batch and head size {q.size(0)} and {q.size(3)}, got {list(k.shape)}")
    if k.size(1) == 0 or q.size(1) % k.size(1):
        raise ValueError(f"k must have a number of heads that divides q's {q.size(1)}, got {k.size(1)}")
