"""Reads PEFT's LoRA layers as projections with adapters, as they are at the call: which are active, merged or switched off.

Names of `peft.tuners.lora`, 0.17 to 0.21; nothing of it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from ..lora import Adapter
from . import parts

LORA = "peft.tuners.lora.layer.Linear"
_LINEAR, _IDENTITY = "torch.nn.modules.linear.Linear", "torch.nn.modules.linear.Identity"


def active(name: str, module: Any) -> tuple[Adapter, ...]:
    """The adapters that a LoRA layer adds to its base in this call: none where they are merged into it or switched off.

    Raises NotImplementedError for variants (DoRA, aLoRA, ...), whose arithmetic is another.
    """
    parts.untouched(name, module)
    parts.own_forward(name, type(module))
    if module.disable_adapters:
        if module.merged:
            module.unmerge()  # as its forward does
        return ()
    if module.merged:
        return ()
    return tuple(_adapter(f"{name}.{key}", module, key) for key in module.active_adapters if key in module.lora_A)


def _adapter(name: str, module: Any, key: str) -> Adapter:
    variant = module.lora_variant.get(key)
    if variant is not None:
        raise NotImplementedError(f"{name} must be a plain LoRA adapter, got {type(variant).__name__}")
    a, b, dropout = module.lora_A[key], module.lora_B[key], module.lora_dropout[key]
    for part, linear in (("lora_A", a), ("lora_B", b)):
        parts.plain(f"{name}.{part}", linear, _LINEAR)
        parts.tensors(f"{name}.{part}", linear.weight, linear.bias, (linear.out_features, linear.in_features))
    if a.bias is not None:
        raise NotImplementedError(f"{name}.lora_A must have no bias, got one")
    is_identity = parts.class_path(type(dropout)) == _IDENTITY
    p = 0.0 if is_identity else parts.active_probability(f"{name}.lora_dropout", dropout)
    return Adapter(a.weight, b.weight, b.bias, float(module.scaling[key]), p)


class AdapterStates(NamedTuple):
    """Which adapters the tuner layers below a module use: a replay of its forward must use the same, whatever was switched since."""

    states: tuple[tuple[Any, bool, Any], ...]

    @classmethod
    def of(cls, layer: nn.Module) -> AdapterStates:
        names = ("_disable_adapters", "_active_adapter")
        tuners: Iterator[Any] = (module for module in layer.modules() if all(hasattr(module, name) for name in names))
        return cls(tuple((module, module._disable_adapters, module._active_adapter) for module in tuners))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Puts the states back for a while, without a say in what requires grad."""
        now = AdapterStates(tuple((module, module._disable_adapters, module._active_adapter) for module, _, _ in self.states))
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        for module, disabled, names in self.states:
            module._disable_adapters, module._active_adapter = disabled, names
