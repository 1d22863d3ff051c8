"""The MLP half of a block: the branch `mlp(n) = down(drop(f(gate(n)) * up(n)))` of rows of the stream, or of their norm, and how it joins
the stream (`ckpt_ext.placement`), forward and backward on plain tensors, a slice of tokens at a time. In a plain pre-norm block it begins
with the sum that ends the attention half, `mid = x + drop(attention's branch)`.

Where `Slicing` says so and no fused kernel makes the hidden layer, it goes by slices of that instead (`ckpt_ext.mlp_columns`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import mlp_columns
from .call import BlockCall, Shared
from .fused_mlp import FusedHidden, fused_hidden
from .gradients import Gradients, GradientSums
from .mlp_products import through_mlp
from .placement import halves
from .rng import Dropout
from .sites import BlockDropout
from .slicing import spans
from .spec import BlockSpec, pointwise
from .weights import BlockWeights


class Stream(NamedTuple):
    """What the half begins with, rows `[N, dim]` each."""

    rows: Tensor
    """What the MLP reads, once `branch` has been added."""
    branch: Tensor | None = None
    """What has yet to be added to `rows`, a slice at a time."""
    onto: Tensor | None = None
    """What the MLP's branch joins; None: what the MLP reads."""
    place: Tensor | None = None
    """Where mid, y and gradients of rows may lie: of no further use but in the slice that is written to, if that."""


def internals_of(spec: BlockSpec, *, fused: bool) -> tuple[str, ...]:
    """What each slice keeps for backward: the rows that the MLP reads, where they are made here; their norm and its statistics, where there
    is one; the outputs of the projections up and gate; what `Half.joint` lists.

    A fused MLP makes no normed rows. The hidden layer itself is never kept: what differentiates the activation makes it again on the way.
    """
    half = halves(spec).mlp
    normed = () if half.entry is None else ("stats",) if fused else ("normed", "stats")
    return (*(("rows",) if spec.adds_late else ()), *normed, "up", *(("gate",) if spec.gated else ()), *half.joint)


def forward(call: BlockCall, weights: BlockWeights, stream: Stream, shared: Shared) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The block's output, rows `[N, dim]`, and for save="all" the internals of each slice by name."""
    dropout, keep, half = call.dropout(shared), call.save == "all", halves(call.spec).mlp
    fused = _fused(call, weights, stream.rows.device)
    if _by_columns(call, fused):
        assert stream.branch is not None
        return mlp_columns.forward(call, weights, stream.branch, stream.rows, shared, place=stream.place)
    names = internals_of(call.spec, fused=fused is not None)
    slices = list(spans(stream.rows.size(0), call.slicing.tokens))
    y, kept = _Assembly(stream.rows, len(slices), stream.place), []
    for span in slices:
        of_span = weights.rows_from(span.start)
        internals = rebuild(call, of_span, fused, stream, span, dropout)
        onto = internals["rows"] if stream.onto is None else stream.onto[span]
        hidden, outputs = _hidden(call, fused, internals, _rows_from(dropout.mlp, span), keep=keep)
        internals = internals | outputs if keep else {}
        joined, of_joint = half.join(call, weights, call.total(of_span.down(hidden)), onto, _rows_from(dropout.mlp_residual, span))
        if keep:
            internals |= of_joint
            kept.append(dict(zip(names, map(internals.__getitem__, names), strict=True)))
        del internals, of_joint, hidden, onto
        y.put(span, joined)
        del joined
    return y.whole, kept


def rebuild(
    call: BlockCall, weights: BlockWeights, fused: FusedHidden | None, stream: Stream, span: slice, dropout: BlockDropout
) -> dict[str, Tensor]:
    """The internals of a slice by name, "rows" those that the MLP reads: all of its forward pass that backward needs, without the
    activation and the down projection, and of a `fused` MLP no more than the rows and their statistics."""
    half, rows, stats = halves(call.spec).mlp, stream.rows[span], None
    residual = _rows_from(dropout.attention_residual, span)
    if fused is not None:
        if stream.branch is not None:
            rows = call.backend.dropout_add(stream.branch[span], rows, residual)
        return {"rows": rows} if half.entry is None else {"rows": rows, "stats": fused.statistics(rows)}
    if stream.branch is None:
        normed, stats = half.enter(call, weights, rows)
    else:
        place = None if stream.place is None else stream.place[span]
        rows, normed, stats = call.backend.add_norm(stream.branch[span], rows, *weights.mlp_norm, call.norm, residual, into=place)
    internals = {"rows": rows} if stats is None else {"rows": rows, "normed": normed, "stats": stats}
    internals["up"] = weights.up(normed)
    if weights.gate is not None:
        internals["gate"] = weights.gate(normed)
    return internals


def unpack(call: BlockCall, weights: BlockWeights, tensors: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """The internals of each slice by name, out of all their tensors in a row."""
    fused = _fused(call, weights, tensors[0].device)
    if _by_columns(call, fused):
        return mlp_columns.unpack(weights, list(tensors))
    names = internals_of(call.spec, fused=fused is not None)
    starts = range(0, len(tensors), len(names))
    return [dict(zip(names, tensors[start : start + len(names)], strict=True)) for start in starts]


def backward(
    call: BlockCall, weights: BlockWeights, needs: Mapping[str, Sequence[bool]], needs_rows: bool, grad_y: Tensor, stream: Stream,
    kept: list[dict[str, Tensor]], shared: Shared,
) -> tuple[Tensor | None, Gradients]:  # fmt: skip
    """Gradients of the rows that the MLP reads (None unless `needs_rows`), on the stream's path from there, too, and of this half's
    parameters, for that of y, rows `[N, dim]`.

    Where nothing is `kept`, each slice is made again from `stream`, with the down projection where the norm behind it needs that.
    """
    dropout, half = call.dropout(shared), halves(call.spec).mlp
    fused = _fused(call, weights, stream.rows.device)
    if _by_columns(call, fused):
        return mlp_columns.backward(
            call, weights, needs, needs_rows, grad_y, stream.branch, stream.rows, kept, shared, place=stream.place
        )
    needs_normed = needs_rows or (half.entry is not None and any(needs[half.entry]))
    needs_branch = needs_normed or any(any(needs.get(part, ())) for part in ("gate", "up", "down"))
    slices = list(spans(stream.rows.size(0), call.slicing.tokens))
    reads_hidden = needs_branch and weights.down.kind.reads_rows
    grad_rows = _Assembly(stream.rows, len(slices), stream.place)
    sums = GradientSums(len(slices))
    for index, span in enumerate(slices):
        of_span, residual = weights.rows_from(span.start), _rows_from(dropout.mlp_residual, span)
        internals = kept[index] if kept else rebuild(call, of_span, fused, stream, span, dropout)
        rows = internals.pop("rows", stream.rows[span])
        joins, hidden = not kept and half.exit is not None, None
        if joins or reads_hidden:
            hidden, _ = _hidden(call, fused, internals | {"rows": rows}, _rows_from(dropout.mlp, span), keep=False, overwrite=False)
        if joins:
            assert hidden is not None
            internals |= half.rejoin(call, weights, call.total(of_span.down(hidden)), rows, residual)
        if not reads_hidden:
            hidden = None
        grad_branch, onto, norm_grads = half.through_join(call, weights, needs, grad_y[span], internals, residual)
        stats = internals.pop("stats", None)
        if needs_branch:
            mlp_dropout = _rows_from(dropout.mlp, span)
            grad_normed = through_mlp(
                of_span, needs, needs_normed, grad_branch.to(call.dtype), sums,
                differentiate=partial(_differentiate, call, fused, internals, rows, stats, mlp_dropout, overwrite=not kept),
                rows=partial(_normed, call, weights, internals, rows),
                of_down=hidden,
            )  # fmt: skip
            if grad_normed is not None:
                grad_normed = call.total(grad_normed)
            grad_span, entry_grads = half.through_entry(
                call, weights, needs, grad_normed, rows, stats, onto=onto if needs_rows else None
            )
            norm_grads |= entry_grads
            if grad_span is not None:
                grad_rows.put(span, grad_span)
        for part, grads in norm_grads.items():
            sums.add(part, grads)
    return grad_rows.whole if needs_rows else None, sums.finish(weights)


def _hidden(
    call: BlockCall, fused: FusedHidden | None, internals: Mapping[str, Tensor], dropout: Dropout | None, *, keep: bool,
    overwrite: bool | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The hidden layer of a slice from its internals, and with `keep` those of them that only a fused kernel makes.

    It may take the place of up, unless `keep` or `overwrite` is False.
    """
    if fused is not None:
        return fused.forward(_read(call, internals["rows"]), internals.get("stats"), dropout, keep=keep)
    overwrite = not keep if overwrite is None else overwrite
    return call.backend.activation(
        internals.get("gate"), internals["up"], pointwise(call.spec.activation), dropout, overwrite=overwrite
    ), {}


def _differentiate(
    call: BlockCall, fused: FusedHidden | None, internals: dict[str, Tensor], rows: Tensor, stats: Tensor | None, dropout: Dropout | None,
    grad: Tensor, *, overwrite: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """`(grad_gate, grad_up, hidden)` from the gradient of a slice's hidden layer, which is of no further use."""
    if fused is not None and "up" not in internals:
        return fused.backward(grad, _read(call, rows), stats, dropout)
    gate, up = internals.pop("gate", None), internals.pop("up")
    return call.backend.activation_backward(grad, gate, up, pointwise(call.spec.activation), dropout, overwrite=overwrite)


def _read(call: BlockCall, rows: Tensor) -> Tensor:
    """Rows as a fused MLP takes them: before the norm, where it has one."""
    return rows if halves(call.spec).mlp.entry is not None else rows.to(call.dtype)


def _normed(call: BlockCall, weights: BlockWeights, internals: dict[str, Tensor], rows: Tensor) -> Tensor:
    """What gate and up of a slice are taken of: its normed rows, which a fused MLP has not kept, or, without a norm, its rows."""
    return internals.pop("normed") if "normed" in internals else halves(call.spec).mlp.enter(call, weights, rows)[0]


def _fused(call: BlockCall, weights: BlockWeights, device: torch.device) -> FusedHidden | None:
    norm, norm_weights = (None, None) if halves(call.spec).mlp.entry is None else (call.norm, weights.mlp_norm)
    return fused_hidden(
        call.backend, weights.gate, weights.up, pointwise(call.spec.activation), call.dtype, device, norm=norm, norm_weights=norm_weights
    )


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
