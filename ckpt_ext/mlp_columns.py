"""The MLP half of a block by slices of the hidden dimension, forward and backward on plain tensors; `ckpt_ext.mlp_half` has it by tokens.

A slice has all rows of some hidden units: `hidden_s = f(gate_s(n)) * up_s(n)` with rows s of the weights of gate and up. With columns s of
the down projection, and g the gradient of its output:

    grad_hidden_s = g W_down[:, s]            dW_down[:, s] = g^T hidden_s           each written to its place: no sum
    dW_up[s] = grad_up_s^T n                  dW_gate[s] = grad_gate_s^T n
    dn = sum_s (grad_up_s W_up[s] + grad_gate_s W_gate[s])                           in float32 or wider

Forward makes gate and up by the same products as backward, since a library's bits may change with a product's shape; its hidden layer is
put together, and the down projection is one product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .call import BlockCall, Shared, flat
from .gradients import Gradients, Places
from .mlp_products import through_mlp
from .projections import Projection
from .slicing import spans
from .spec import pointwise
from .validate import widened
from .weights import BlockWeights

_BEFORE_SLICES = ("mid", "normed", "stats")


class _Slice(NamedTuple):
    """The projections of some hidden units, and the places of their gradients."""

    gate: Projection | None
    up: Projection
    down: Projection
    places: Places


def forward(
    call: BlockCall, weights: BlockWeights, branch: Tensor, x: Tensor, shared: Shared, *, place: Tensor | None
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The block's output; for save="all" mid, its normed rows and their statistics by name, then up and gate of each slice.

    mid may lie in `place`, if given.
    """
    rows, keep = flat(x), call.save == "all"
    mid, normed, stats = _add_norm(call, weights, branch, rows, shared, place)
    kept = [dict(zip(_BEFORE_SLICES, (mid, normed, stats), strict=True))] if keep else []
    hidden = normed.new_empty(normed.size(0), call.spec.hidden_dim)
    for span in _spans(call):
        inner = _inner(_cut(weights, span, {}), normed)
        hidden[:, span] = call.backend.activation(
            inner.get("gate"), inner["up"], pointwise(call.spec.activation), None, overwrite=not keep
        )
        if keep:
            kept.append(inner)
        del inner
    del normed
    y = call.backend.dropout_add(call.total(weights.down(hidden)), mid, call.dropout(shared).mlp_residual)
    return y.view(x.shape), kept


def unpack(weights: BlockWeights, tensors: list[Tensor]) -> list[dict[str, Tensor]]:
    """What forward has kept, out of all its tensors in a row."""
    first, rest = len(_BEFORE_SLICES), ("up",) if weights.gate is None else ("up", "gate")
    slices = (tensors[start : start + len(rest)] for start in range(first, len(tensors), len(rest)))
    return [dict(zip(_BEFORE_SLICES, tensors[:first], strict=True)), *(dict(zip(rest, inner, strict=True)) for inner in slices)]


def backward(
    call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], needs_mid: bool, grad_y: Tensor, branch: Tensor | None,
    x: Tensor, kept: list[dict[str, Tensor]], shared: Shared, *, place: Tensor | None,
) -> tuple[Tensor | None, Gradients]:  # fmt: skip
    """Gradients of mid (None unless `needs_mid`) and of this half's parameters; without a `branch` from what was `kept`."""
    grad_rows, dropout = flat(grad_y), call.dropout(shared).mlp_residual
    if branch is None:
        internals = dict(kept[0])
    else:
        mid, normed, stats = _add_norm(call, weights, branch, flat(x), shared, place)
        internals = {"mid": mid, "normed": normed, "stats": stats}
        del normed
    grad_branch = (grad_rows if dropout is None else call.backend.dropout(grad_rows, dropout)).to(call.dtype)
    needs_rows = needs_mid or any(needs["mlp_norm"])
    grad_normed, grads = _through_slices(call, weights, needs, needs_rows, grad_branch, internals.pop("normed"), kept[1:])
    del grad_branch
    if grad_normed is not None:
        grad_normed = call.total(grad_normed)
    grad_mid, norm_grads = call.through_norm(
        grad_normed, internals["mid"], weights.mlp_norm, internals["stats"], needs["mlp_norm"], onto=grad_rows if needs_mid else None
    )
    return None if grad_mid is None else grad_mid.view(x.shape), grads | {"mlp_norm": norm_grads}


def _through_slices(
    call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], needs_rows: bool, grad: Tensor, normed: Tensor,
    kept: list[dict[str, Tensor]],
) -> tuple[Tensor | None, Gradients]:  # fmt: skip
    """From `grad` of the down projection's output: the gradient of the normed rows (None unless `needs_rows`) and those of the weights.

    up and gate are those that were `kept`, if any, and else made again.
    """
    pointwise_name = pointwise(call.spec.activation)
    wholes: Gradients = {part: _places_for(getattr(weights, part), needs[part]) for part in ("gate", "up", "down") if part in needs}
    grad_normed = normed.new_zeros(normed.shape, dtype=widened(normed.dtype)) if needs_rows else None
    for index, span in enumerate(_spans(call)):
        part = _cut(weights, span, wholes)
        inner = dict(kept[index]) if kept else _inner(part, normed)

        def differentiate(grad: Tensor, inner: dict[str, Tensor] = inner) -> tuple[Tensor | None, Tensor, Tensor]:
            gate, up = inner.pop("gate", None), inner.pop("up")
            return call.backend.activation_backward(grad, gate, up, pointwise_name, None, overwrite=not kept)

        through_mlp(part, needs, needs_rows, grad, part.places, differentiate=differentiate, rows=lambda: normed, onto=grad_normed)
    return grad_normed, wholes


def _add_norm(
    call: BlockCall, weights: BlockWeights, branch: Tensor, rows: Tensor, shared: Shared, place: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dropout = call.dropout(shared).attention_residual
    return call.backend.add_norm(branch, rows, *weights.mlp_norm, call.norm, dropout, into=place)


def _spans(call: BlockCall) -> Iterator[slice]:
    assert call.slicing.hidden is not None
    return spans(call.spec.hidden_dim, call.slicing.hidden)


def _inner(part: _Slice, normed: Tensor) -> dict[str, Tensor]:
    """Outputs of up and gate for a slice of hidden units."""
    inner = {"up": part.up(normed)}
    if part.gate is not None:
        inner["gate"] = part.gate(normed)
    return inner


def _cut(weights: BlockWeights, span: slice, wholes: Mapping[str, Sequence[Tensor | None]]) -> _Slice:
    """The projections of the hidden units in `span`, and their places in `wholes`, gradients of all."""
    pieces: dict[str, Projection | None] = {}
    places = {}
    for name in ("gate", "up", "down"):
        whole: Projection | None = getattr(weights, name)
        pieces[name] = None
        if whole is not None:
            cut = whole.kind.columns if name == "down" else whole.kind.rows
            pieces[name] = whole.kind.bind(cut(whole.tensors, span))
            if name in wholes:
                places[name] = cut(wholes[name], span)
    return _Slice(**pieces, places=Places(places))  # type: ignore[arg-type]


def _places_for(projection: Projection, needs: Sequence[bool]) -> list[Tensor | None]:
    """Room for the gradients of a projection's tensors."""
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if t is not None and need else None
        for t, need in zip(projection.tensors, needs, strict=True)
    ]
