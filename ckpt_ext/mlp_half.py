"""The MLP half of a block, `y = mid + drop(mlp(norm(mid)))` with `mlp(n) = down(drop(f(gate(n)) * up(n)))`, forward and backward on
plain tensors, a slice of tokens at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .backends import Backend
from .call import BlockCall, flat
from .gradients import Gradients, GradientSums
from .projections import Projection
from .rng import Dropout
from .sites import BlockDropout
from .slicing import spans
from .spec import pointwise
from .weights import BlockWeights

INTERNALS = ("normed", "stats", "up", "gate")
"""What lies between mid and the hidden layer, in each slice: the normed rows and their statistics, and the projections' outputs.

The hidden layer itself is never kept: the kernel that differentiates the activation makes it again on the way.
"""

PLAIN_INTERNALS = INTERNALS[:3]
"""The same of a plain MLP, which has no gate."""


class MlpWeights(Protocol):
    """The projections of an MLP; `gate` is None in a plain one."""

    @property
    def gate(self) -> Projection | None: ...
    @property
    def up(self) -> Projection: ...
    @property
    def down(self) -> Projection: ...


def forward(
    call: BlockCall, weights: BlockWeights, mid: Tensor, dropout: BlockDropout
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The block's output, and for save="all" the internals of each slice by name."""
    rows = flat(mid)
    slices = list(spans(rows.size(0), call.slicing.tokens))
    y, kept = _Assembly(rows, len(slices)), []
    for span in slices:
        internals = rebuild(call, weights, rows[span])
        keep = call.save == "all"
        hidden = call.backend.activation(
            internals.get("gate"), internals["up"], pointwise(call.spec.activation), _rows_from(dropout.mlp, span), overwrite=not keep
        )
        if keep:
            kept.append(internals)
        del internals
        branch = weights.down(hidden)
        y.put(span, call.backend.dropout_add(branch, rows[span], _rows_from(dropout.mlp_residual, span)))
    return y.whole.view(mid.shape), kept


def rebuild(call: BlockCall, weights: BlockWeights, rows: Tensor) -> dict[str, Tensor]:
    """The internals of a slice by name: all of its forward pass that backward needs, so without the activation and the down projection."""
    normed, stats = call.backend.norm(rows, *weights.mlp_norm, call.norm)
    normed = normed.to(call.dtype)
    internals = {"normed": normed, "stats": stats, "up": weights.up(normed)}
    if weights.gate is not None:
        internals["gate"] = weights.gate(normed)
    return internals


def unpack(tensors: list[Tensor], *, gated: bool) -> list[dict[str, Tensor]]:
    """The internals of each slice by name, out of all their tensors in a row."""
    names = INTERNALS if gated else PLAIN_INTERNALS
    starts = range(0, len(tensors), len(names))
    return [dict(zip(names, tensors[start : start + len(names)], strict=True)) for start in starts]


def backward(
    call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], needs_mid: bool, grad_y: Tensor, mid: Tensor,
    kept: list[dict[str, Tensor]], dropout: BlockDropout,
) -> tuple[Tensor | None, Gradients]:
    """Gradients of mid (None unless `needs_mid`) and of this half's parameters.

    Where nothing is `kept`, mid is of no further use, and its gradient takes its place.
    """
    rows, grad_rows = flat(mid), flat(grad_y)
    slices = list(spans(rows.size(0), call.slicing.tokens))
    grad_mid = _Assembly(rows, len(slices), reuse=not kept)
    sums = GradientSums(len(slices))
    for index, span in enumerate(slices):
        internals = kept[index] if kept else rebuild(call, weights, rows[span])
        grad_branch = grad_rows[span]
        if dropout.mlp_residual is not None:
            grad_branch = call.backend.dropout(grad_branch, dropout.mlp_residual.rows_from(span.start))
        stats = internals.pop("stats")
        grad_normed = through_mlp(
            call.backend, call.spec.activation, weights, needs, needs_mid or any(needs["mlp_norm"]), grad_branch.to(call.dtype),
            internals, _rows_from(dropout.mlp, span), sums, overwrite=not kept,
        )  # fmt: skip
        if grad_normed is not None:
            grad_span, norm_grads = call.through_norm(
                grad_normed, rows[span], weights.mlp_norm, stats, needs["mlp_norm"], onto=grad_rows[span] if needs_mid else None
            )
            sums.add("mlp_norm", norm_grads)
            if grad_span is not None:
                grad_mid.put(span, grad_span)
    return grad_mid.whole.view(mid.shape) if needs_mid else None, sums.finish(weights)


def through_mlp(
    backend: Backend, activation: str, weights: MlpWeights, needs: Mapping[str, Sequence[bool]], needs_rows: bool, grad: Tensor,
    internals: dict[str, Tensor], dropout: Dropout | None, sums: GradientSums, *, overwrite: bool,
) -> Tensor | None:  # fmt: skip
    """From `grad [N, dim]` of an MLP's output: the gradient of its rows "normed" (None unless `needs_rows`); its projections' go to `sums`.

    Empties `internals` as it goes, and with `overwrite` writes over them.
    """
    grad_gate, grad_up, hidden = backend.activation_backward(
        weights.down.grad_input(grad), internals.pop("gate", None), internals.pop("up"), pointwise(activation), dropout, overwrite=overwrite
    )
    sums.add_product("down", weights.down, grad, hidden, needs["down"])
    del hidden

    rows = internals.pop("normed")
    sums.add_product("up", weights.up, grad_up, rows, needs["up"])
    grad_rows = weights.up.grad_input(grad_up) if needs_rows else None
    del grad_up
    if weights.gate is not None:
        assert grad_gate is not None
        sums.add_product("gate", weights.gate, grad_gate, rows, needs["gate"])
        if needs_rows:
            grad_rows = weights.gate.grad_input(grad_gate, into=grad_rows)
    return grad_rows


class _Assembly:
    """Rows put together from slices: a lone slice is the whole as it is, several go to their places in one tensor."""

    def __init__(self, like: Tensor, slices: int, *, reuse: bool = False) -> None:
        self._alone = slices == 1
        self.whole = like if reuse or self._alone else torch.empty_like(like)

    def put(self, span: slice, rows: Tensor) -> None:
        if self._alone:
            self.whole = rows
        else:
            self.whole[span] = rows


def _rows_from(dropout: Dropout | None, span: slice) -> Dropout | None:
    return None if dropout is None else dropout.rows_from(span.start)
