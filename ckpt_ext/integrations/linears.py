"""Reads the linear children of a layer as projections: plain, transposed, adapted or quantised ones, and several in one parameter."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from .. import dtensors
from ..called import Called
from ..lora import Adapter, LoRA
from ..projections import Dense, Projection
from ..spec import BlockSpec
from . import adapters, parts

_LINEAR, _TRANSPOSED = "torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D"
_QUANTISED = frozenset({
    "bitsandbytes", "torchao", "hqq", "auto_gptq", "gptqmodel", "awq", "eetq", "aqlm", "quanto", "compressed_tensors", "fbgemm_gpu",
})  # fmt: skip
"""Packages whose linear layers compute from quantised weights, the same at every call."""


class Fused(NamedTuple):
    """One linear child that is several projections."""

    path: str
    layout: Literal["stacked", "interleaved"] = "stacked"
    """Whether its outputs are all of the first projection, then all of the next; or the first's of head 0, the next's of head 0, ..."""


def linear(name: str, module: Any, shape: tuple[int, int]) -> Projection:
    """The projection that a child is; `shape` is `(out, in)`. Raises NotImplementedError for one that the engine could not honour.

    Quantised layers are called. Other subclasses of `nn.Linear` are refused: what they do may be random.
    """
    if parts.class_path(type(module)) == adapters.LORA:
        added = adapters.active(name, module)
        base = linear(f"{name}.base_layer", module.base_layer, shape)
        if added and isinstance(base, Dense) and base.share is not None:
            raise NotImplementedError(f"{name}.base_layer must be whole to have adapters, got one that is cut across ranks")
        return LoRA(base, added) if added else base
    if _is_quantised(module):
        if (module.out_features, module.in_features) != shape:
            raise NotImplementedError(f"{name} must map {shape[1]} to {shape[0]}, got {module.in_features} to {module.out_features}")
        parts.untouched(name, module)
        return Called.of(module)
    if dtensors.is_distributed(module):
        return dtensors.linear(name, module, shape)
    return Dense(*_dense(name, module, shape))


def fused(place: Fused, module: Any, widths: tuple[int, ...], spec: BlockSpec) -> tuple[Projection, ...]:
    """The projections, `widths` wide, in one child: views of its parameters, through which autograd adds up one gradient.

    An adapter of such a child may not drop: its one mask would be another one for each projection.
    """
    added: tuple[Adapter, ...] = ()
    if parts.class_path(type(module)) == adapters.LORA:
        added, module = adapters.active(place.path, module), module.base_layer
    weight, bias = _dense(place.path, module, (sum(widths), spec.dim))
    biases: tuple[Tensor | None, ...] = (None,) * len(widths)
    if bias is not None:
        biases = _pieces(place, bias, widths, spec)
    bases = [Dense(piece, shift) for piece, shift in zip(_pieces(place, weight, widths, spec), biases, strict=True)]
    if not added:
        return tuple(bases)
    if any(adapter.p > 0 or adapter.b_bias is not None for adapter in added):
        raise NotImplementedError(f"adapters of {place.path}, which is {len(widths)} projections, must have no dropout and no bias")
    parts_of_b = [[piece.flatten(0, -2) for piece in _pieces(place, adapter.b, widths, spec)] for adapter in added]
    return tuple(
        LoRA(base, tuple(adapter._replace(b=pieces[index]) for adapter, pieces in zip(added, parts_of_b, strict=True)))
        for index, base in enumerate(bases)
    )


def _pieces(place: Fused, tensor: Tensor, widths: tuple[int, ...], spec: BlockSpec) -> tuple[Tensor, ...]:
    """What of a fused tensor `[out, ...]` belongs to each projection: `[width, ...]`, or `[heads, D, ...]` where heads interleave."""
    if place.layout == "stacked":
        return tensor.split(widths)
    return tensor.view(spec.heads, len(widths), spec.head_dim, *tensor.shape[1:]).unbind(1)


def _is_quantised(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in _QUANTISED and isinstance(getattr(module, "out_features", None), int)


def _dense(name: str, module: nn.Module, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Weight `[out, in]` and bias of a child that multiplies by it and does nothing more."""
    kind = _TRANSPOSED if parts.class_path(type(module)) == _TRANSPOSED else _LINEAR
    parts.plain(name, module, kind)
    weight, bias = module.weight, module.bias
    if kind == _TRANSPOSED and isinstance(weight, Tensor):
        parts.tensors(name, weight, None, shape[::-1])
        return weight.t(), parts.tensors(name, bias, None, shape[:1])[0]
    return parts.tensors(name, weight, bias, shape)
