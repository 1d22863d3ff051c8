"""A block, forward and backward, both halves, on plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from . import attention_half, mlp_half
from .call import BlockCall, Shared, flat
from .gradients import Gradients
from .mlp_half import Stream
from .mlp_products import place_of
from .placement import halves
from .weights import BlockWeights

Needs = Mapping[str, Sequence[bool]]


def run_block(call: BlockCall, weights: BlockWeights, x: Tensor, shared: Shared) -> tuple[Tensor, list[Tensor]]:
    """The block's output, and what `call.save` keeps besides the inputs: internals of the attention half, then the rest for "all"."""
    internals = attention_half.rebuild(call, weights, x, shared, kept={})
    branch = attention_half.project(call, weights, internals)
    if _keeps_branch(call):
        internals["branch"] = branch
    # What backward rebuilds is dropped before the MLP half makes its own.
    kept = list(map(internals.__getitem__, kept_names(call)))
    del internals
    stream, joined = _join(call, weights, branch, x, shared)
    if call.save == "all":
        kept += map(joined.__getitem__, _names_of_join(call))
    del branch, joined
    y, slices = mlp_half.forward(call, weights, stream, shared)
    if call.save == "all":
        kept += (tensor for internals in slices for tensor in internals.values())
    return y.view(x.shape), kept


def kept_names(call: BlockCall) -> tuple[str, ...]:
    """Which internals of the attention half are kept."""
    internals = {"input": (), "attention": ("out", "lse"), "all": attention_half.internals_of(call.spec)}[call.save]
    return (*internals, "branch") if _keeps_branch(call) else internals


def differentiate_block(
    call: BlockCall, weights: BlockWeights, needs: Needs, needs_x: bool, grad_y: Tensor, x: Tensor, kept: Sequence[Tensor], shared: Shared
) -> tuple[Tensor | None, Gradients]:
    """Gradients of x (None unless `needs_x`) and of the parameters by part, from what `run_block` has `kept`."""
    names = (*kept_names(call), *(_names_of_join(call) if call.save == "all" else ()))
    internals = dict(zip(names, kept, strict=False))
    slices = mlp_half.unpack(call, weights, kept[len(internals) :]) if call.save == "all" else []
    needs_attention = needs_x or any(any(needs.get(part, ())) for part in attention_half.PARTS)
    if call.save == "all":
        stream = Stream(internals.pop("mid", flat(x)))
    elif call.spec.parallel:
        stream = Stream(flat(x))
        internals = attention_half.rebuild(call, weights, x, shared, kept=internals) if needs_attention else {}
    else:
        branch = internals.pop("branch", None)
        internals = attention_half.rebuild(call, weights, x, shared, kept=internals)
        if branch is None:
            branch = attention_half.project(call, weights, internals)
        stream, joined = _join(call, weights, branch, x, shared)
        del branch
        joined.pop("mid", None)
        internals |= joined
        del joined
    needs_rows = needs_x if call.spec.parallel else needs_attention
    grad_rows, grads = mlp_half.backward(call, weights, needs, needs_rows, flat(grad_y), stream, slices, shared)
    del stream
    if not needs_attention:
        return None, grads
    # They go over with the internals, so that the attention half can free each as soon as it is done with it.
    if not call.spec.parallel:
        assert grad_rows is not None
        internals["grad_mid"] = grad_rows
    else:
        internals["grad_mid"] = flat(grad_y)
        if grad_rows is not None:
            internals["grad_stream"] = grad_rows
    del grad_rows
    grad_x, attention_grads = attention_half.backward(call, weights, needs, needs_x, x, internals, shared)
    return None if grad_x is None else grad_x.view(x.shape), grads | attention_grads


def _keeps_branch(call: BlockCall) -> bool:
    """Whether the attention half's branch is kept, so that it need not be added up over ranks again. A norm behind it writes into it."""
    return call.across is not None and call.save != "all" and call.spec.adds_late


def _names_of_join(call: BlockCall) -> tuple[str, ...]:
    """What backward needs of where attention's branch joins x, with "mid", what they make: nothing in blocks without a norm there."""
    joint = halves(call.spec).attention.joint
    return (*joint, "mid") if joint else ()


def _join(call: BlockCall, weights: BlockWeights, branch: Tensor, x: Tensor, shared: Shared) -> tuple[Stream, dict[str, Tensor]]:
    """What the MLP half begins with, and by name what `_names_of_join` lists; `branch` joins x here, or else a slice at a time there."""
    rows, keep = flat(x), call.save == "all"
    if call.spec.adds_late:
        return Stream(rows, branch=branch, place=None if keep or _keeps_branch(call) else place_of(branch, rows)), {}
    half = halves(call.spec).attention
    mid, joined = half.join(call, weights, branch, rows, call.dropout(shared).attention_residual)
    if call.spec.parallel:
        return Stream(rows, onto=mid, place=mid), {}
    return Stream(mid, place=None if keep else mid), joined | {"mid": mid}
