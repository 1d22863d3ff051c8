"""Reads the linear children of a layer as projections: plain ones, GPT-2's transposed ones, and several in one parameter."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor, nn

from ..projections import Dense, Projection
from ..spec import BlockSpec
from . import parts

_LINEAR, _TRANSPOSED = "torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D"


class Fused(NamedTuple):
    """One linear child that is several projections."""

    path: str
    layout: Literal["stacked", "interleaved"] = "stacked"
    """Whether its outputs are all of the first projection, then all of the next; or the first's of head 0, the next's of head 0, ..."""


def linear(name: str, module: nn.Module, shape: tuple[int, int]) -> Projection:
    """The projection that a child is; `shape` is `(out, in)`. Raises NotImplementedError for one that the engine could not honour."""
    return Dense(*_dense(name, module, shape))


def fused(place: Fused, module: nn.Module, widths: tuple[int, ...], spec: BlockSpec) -> tuple[Projection, ...]:
    """The projections, `widths` wide, in one child: views of its parameters, through which autograd adds up one gradient."""
    weight, bias = _dense(place.path, module, (sum(widths), spec.dim))
    if place.layout == "stacked":
        pieces = weight.split(widths)
        biases = (None,) * len(widths) if bias is None else bias.split(widths)
    else:
        count = len(widths)
        pieces = weight.view(spec.heads, count, spec.head_dim, spec.dim).unbind(1)
        biases = (None,) * count if bias is None else bias.view(spec.heads, count, spec.head_dim).unbind(1)
    return tuple(Dense(piece, shift) for piece, shift in zip(pieces, biases, strict=True))


def _dense(name: str, module: nn.Module, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Weight `[out, in]` and bias of a child that multiplies by it and does nothing more."""
    kind = _TRANSPOSED if parts.class_path(type(module)) == _TRANSPOSED else _LINEAR
    parts.plain(name, module, kind)
    weight, bias = module.weight, module.bias
    if kind == _TRANSPOSED and isinstance(weight, Tensor):
        parts.tensors(name, weight, None, shape[::-1])
        return weight.t(), parts.tensors(name, bias, None, shape[:1])[0]
    return parts.tensors(name, weight, bias, shape)
