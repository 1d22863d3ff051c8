"""The MLP half of a block: `mid = x + drop(branch)`, which ends the attention half, and `y = mid + drop(mlp(norm(mid)))` with
`mlp(n) = down(drop(f(gate(n)) * up(n)))`, forward and backward on plain tensors, a slice of tokens at a time.

Where `Slicing` says so and no fused kernel makes the hidden layer, it goes by slices of that instead (`ckpt_ext.mlp_columns`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from . import mlp_columns
from .call import BlockCall, Shared, flat
from .fused_mlp import FusedHidden, fused_hidden
from .gradients import Gradients, GradientSums
from .mlp_products import place_of, through_mlp
from .rng import Dropout
from .sites import BlockDropout
from .slicing import spans
from .spec import pointwise
from .weights import BlockWeights


def internals_of(*, gated: bool, fused: bool) -> tuple[str, ...]:
    """What lies before the hidden layer, in each slice: mid, its normed rows and their statistics, and the projections' outputs.

    A fused MLP makes no normed rows. The hidden layer itself is never kept: what differentiates the activation makes it again on the way.
    """
    return ("mid", *(() if fused else ("normed",)), "stats", "up", *(("gate",) if gated else ()))


def forward(
    call: BlockCall, weights: BlockWeights, branch: Tensor, x: Tensor, shared: Shared
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The block's output, and for save="all" the internals of each slice by name.

    `branch [N, dim]` is what the attention half adds to x; of no further use, it gives its place to mid and y where it may.
    """
    rows, dropout, keep = flat(x), shared.dropout(call.spec), call.save == "all"
    fused = _fused(call, weights, x.device)
    if _by_columns(call, fused):
        return mlp_columns.forward(call, weights, branch, x, shared)
    place = None if keep else place_of(branch, rows)
    slices = list(spans(rows.size(0), call.slicing.tokens))
    y, kept = _Assembly(rows, len(slices), place), []
    for span in slices:
        of_span = weights.rows_from(span.start)
        internals = rebuild(call, of_span, fused, branch, rows, span, dropout, place)
        mid, mlp_dropout = internals["mid"], _rows_from(dropout.mlp, span)
        if fused is None:
            hidden = call.backend.activation(
                internals.get("gate"), internals["up"], pointwise(call.spec.activation), mlp_dropout, overwrite=not keep
            )
        else:
            hidden, outputs = fused.forward(mid, internals["stats"], mlp_dropout, keep=keep)
            internals |= outputs
        if keep:
            kept.append(internals)
        del internals
        y.put(span, call.backend.dropout_add(of_span.down(hidden), mid, _rows_from(dropout.mlp_residual, span)))
    return y.whole.view(x.shape), kept


def rebuild(
    call: BlockCall, weights: BlockWeights, fused: FusedHidden | None, branch: Tensor, x: Tensor, span: slice, dropout: BlockDropout,
    place: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    """The internals of a slice of rows by name: all of its forward pass that backward needs, so without the activation and the down
    projection, and of a `fused` MLP no more than mid and its statistics. mid may lie in `place`, rows like x's, where that is given."""
    if fused is not None:
        mid = call.backend.dropout_add(branch[span], x[span], _rows_from(dropout.attention_residual, span))
        return {"mid": mid, "stats": fused.statistics(mid)}
    mid, normed, stats = call.backend.add_norm(
        branch[span], x[span], *weights.mlp_norm, call.norm, _rows_from(dropout.attention_residual, span),
        into=None if place is None else place[span],
    )  # fmt: skip
    internals = {"mid": mid, "normed": normed, "stats": stats, "up": weights.up(normed)}
    if weights.gate is not None:
        internals["gate"] = weights.gate(normed)
    return internals


def unpack(call: BlockCall, weights: BlockWeights, tensors: list[Tensor]) -> list[dict[str, Tensor]]:
    """The internals of each slice by name, out of all their tensors in a row."""
    fused = _fused(call, weights, tensors[0].device)
    if _by_columns(call, fused):
        return mlp_columns.unpack(weights, tensors)
    names = internals_of(gated=weights.gate is not None, fused=fused is not None)
    starts = range(0, len(tensors), len(names))
    return [dict(zip(names, tensors[start : start + len(names)], strict=True)) for start in starts]


def backward(
    call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], needs_mid: bool, grad_y: Tensor, branch: Tensor | None,
    x: Tensor, kept: list[dict[str, Tensor]], shared: Shared,
) -> tuple[Tensor | None, Gradients]:  # fmt: skip
    """Gradients of mid (None unless `needs_mid`) and of this half's parameters.

    Where nothing is `kept`, each slice is made again from `branch`, whose place mid and then its gradient take where they may.
    """
    rows, grad_rows, dropout = flat(x), flat(grad_y), shared.dropout(call.spec)
    fused = _fused(call, weights, x.device)
    if _by_columns(call, fused):
        return mlp_columns.backward(call, weights, needs, needs_mid, grad_y, branch, x, kept, shared)
    place = None if branch is None else place_of(branch, rows)
    slices = list(spans(rows.size(0), call.slicing.tokens))
    grad_mid = _Assembly(rows, len(slices), place)
    sums = GradientSums(len(slices))
    for index, span in enumerate(slices):
        of_span = weights.rows_from(span.start)
        if branch is None:
            internals = kept[index]
        else:
            internals = rebuild(call, of_span, fused, branch, rows, span, dropout, place)
        grad_branch = grad_rows[span]
        if dropout.mlp_residual is not None:
            grad_branch = call.backend.dropout(grad_branch, dropout.mlp_residual.rows_from(span.start))
        mid, stats = internals.pop("mid"), internals.pop("stats")
        grad_normed = through_mlp(
            of_span, needs, needs_mid or any(needs["mlp_norm"]), grad_branch.to(call.dtype), sums,
            differentiate=partial(_differentiate, call, fused, internals, mid, stats, _rows_from(dropout.mlp, span), overwrite=not kept),
            rows=partial(_normed, call, weights, internals, mid),
        )  # fmt: skip
        if grad_normed is not None:
            grad_span, norm_grads = call.through_norm(
                grad_normed, mid, weights.mlp_norm, stats, needs["mlp_norm"], onto=grad_rows[span] if needs_mid else None
            )
            sums.add("mlp_norm", norm_grads)
            if grad_span is not None:
                grad_mid.put(span, grad_span)
    return grad_mid.whole.view(x.shape) if needs_mid else None, sums.finish(weights)


def _differentiate(
    call: BlockCall, fused: FusedHidden | None, internals: dict[str, Tensor], mid: Tensor, stats: Tensor, dropout: Dropout | None,
    grad: Tensor, *, overwrite: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """`(grad_gate, grad_up, hidden)` from the gradient of a slice's hidden layer, which is of no further use."""
    if fused is not None and "up" not in internals:
        return fused.backward(grad, mid, stats, dropout)
    gate, up = internals.pop("gate", None), internals.pop("up")
    return call.backend.activation_backward(grad, gate, up, pointwise(call.spec.activation), dropout, overwrite=overwrite)


def _normed(call: BlockCall, weights: BlockWeights, internals: dict[str, Tensor], mid: Tensor) -> Tensor:
    """The normed rows of a slice, which a fused MLP has not kept."""
    if "normed" in internals:
        return internals.pop("normed")
    return call.backend.norm(mid, *weights.mlp_norm, call.norm)[0].to(call.dtype)


def _fused(call: BlockCall, weights: BlockWeights, device: torch.device) -> FusedHidden | None:
    return fused_hidden(
        call.backend, weights.gate, weights.up, pointwise(call.spec.activation), call.dtype, device,
        norm=call.norm, norm_weights=weights.mlp_norm,
    )  # fmt: skip


def _by_columns(call: BlockCall, fused: FusedHidden | None) -> bool:
    return call.slicing.hidden is not None and fused is None


class _Assembly:
    """Rows put together from slices: a lone slice is the whole as it is, several go to their places in one tensor, in `place` if given."""

    def __init__(self, like: Tensor, slices: int, place: Tensor | None) -> None:
        self._alone = slices == 1
        if self._alone:
            self.whole = like
        else:
            self.whole = torch.empty_like(like, memory_format=torch.contiguous_format) if place is None else place

    def put(self, span: slice, rows: Tensor) -> None:
        if self._alone:
            self.whole = rows
        else:
            self.whole[span] = rows


def _rows_from(dropout: Dropout | None, span: slice) -> Dropout | None:
    return None if dropout is None else dropout.rows_from(span.start)
