"""Layers that torch.distributed shards: the class that it makes around a layer's own, and parameters that are whole in calls alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def own_class(kind: type[Any]) -> type[Any]:
    """`kind`, or the class that `fully_shard` or `replicate` made it of, by a base with methods of its own and no forward."""
    while len(kind.__bases__) == 2 and _is_mixin(kind.__bases__[0]):
        if not _same_forward(kind, kind.__bases__[1]):
            break
        kind = kind.__bases__[1]
    return kind


def is_sharded(layer: nn.Module) -> bool:
    """Whether `fully_shard` or `replicate` was called on this very layer, before a swap or after."""
    return any(_is_mixin(base) for base in type(layer).__mro__)


def has_pieces(layer: nn.Module) -> bool:
    """Whether parameters are pieces of flat ones between calls, as FSDP1 has them, whose shapes are not the layer's."""
    return any(_is_managed(module) and not _distributed(module) for module in layer.modules() if module._parameters)


def remade(kind: type[Any], bases: tuple[type[Any], ...], **body: Any) -> type[Any]:
    """The class `kind` again, of other bases and with `body` added."""
    kept = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    if _same_forward(kind, kind.__bases__[-1]):
        kept.pop("forward", None)  # the library gives each class that is made one, around its base's
    return type(kind.__name__, bases, kept | body)


def _is_managed(module: nn.Module) -> bool:
    return getattr(module, "_is_fsdp_managed_module", False)


def _distributed(module: nn.Module) -> list[tuple[str, Any]]:
    from torch.distributed.tensor import DTensor

    return [(name, tensor) for name, tensor in module._parameters.items() if isinstance(tensor, DTensor)]


def _same_forward(kind: type[Any], base: type[Any]) -> bool:
    return inspect.unwrap(kind.forward) is inspect.unwrap(base.forward)


def _is_mixin(base: type[Any]) -> bool:
    return base.__module__.startswith("torch.distributed.") and not issubclass(base, nn.Module) and not hasattr(base, "forward")


@contextlib.contextmanager
def whole(layer: nn.Module) -> Iterator[bool]:
    """Run the body with parameters without values in place of those that FSDP gathers for the time of a call, so that shapes can be read:
    DTensors, and the views, of what is freed between calls, that FSDP1 sets where it has flat parameters alone.

    Gives False, and changes nothing, where some are shares of another axis of ranks, too, and what a call finds cannot be known.
    """
    managed = [module for module in layer.modules() if _is_managed(module)]
    found: list[tuple[dict[str, Any], str, Any]]
    found = [(module._parameters, name, tensor) for module in managed for name, tensor in _distributed(module)]
    if any(tensor.device_mesh.ndim > 1 for _, _, tensor in found):
        yield False
        return
    found += [(vars(module), name, value) for module in managed for name, value in vars(module).items() if isinstance(value, Tensor)]
    try:
        for place, name, tensor in found:
            place[name] = nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor.requires_grad)
        yield True
    finally:
        for place, name, tensor in found:
            place[name] = tensor
