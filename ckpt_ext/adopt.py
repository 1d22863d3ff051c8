"""Reads parameters out of modules whose `forward` the engine steps around, and refuses by name what it could not honour."""

from typing import Any

from torch import Tensor, nn

from . import dtensors
from .projections import Dense
from .spec import BlockSpec
from .validate import is_floating
from .weights import NormWeights

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""What holds a module's hooks; with "_global" before it, in torch.nn.modules.module, those of all modules."""


def dense(name: str, module: nn.Module) -> Dense:
    """The projection that `module`, an `nn.Linear` and nothing more, is.

    Raises NotImplementedError where its forward may do more than multiply: a subclass (adapters, quantised and parametrised linears), a
    hook, a weight that is no plain floating-point tensor (sharded, quantised). Of one that is tensor parallel this rank's share.
    """
    if isinstance(module, nn.Linear) and dtensors.is_distributed(module):
        return dtensors.linear(name, module, (module.out_features, module.in_features))
    plain(name, module, nn.Linear)
    assert isinstance(module, nn.Linear)
    return Dense(*_parameters(name, module, (module.out_features, module.in_features)))


def norm(name: str, module: nn.Module, spec: BlockSpec, width: int) -> NormWeights:
    """The scale and shift, `width` wide, of `module`, the `nn.RMSNorm` or `nn.LayerNorm` that `spec` asks for and nothing more.

    Raises like `dense`.
    """
    plain(name, module, nn.RMSNorm if spec.norm == "rms" else nn.LayerNorm)
    if module.eps != spec.norm_eps:
        raise NotImplementedError(f"{name}.eps must be the spec's norm_eps {spec.norm_eps}, got {module.eps}")
    return NormWeights(*_parameters(name, module, (width,)))


def plain(name: str, module: nn.Module, kind: type) -> None:
    """Refuse by name, with NotImplementedError, a module whose class, hooks or own `forward` may do more than a `kind` does."""
    if type(module) is not kind:
        raise NotImplementedError(f"{name} must be exactly {kind.__name__}, got {type(module).__name__}, whose forward would be skipped")
    for hooks in HOOKS:
        if getattr(module, hooks):
            raise NotImplementedError(f"{name} must have no hooks, got {hooks.strip('_')}, which would be skipped")
    if "forward" in module.__dict__:
        raise NotImplementedError(f"{name} must keep its class's forward, got one of its own, which would be skipped")


def no_hooks_on_all_modules() -> None:
    """Refuse hooks that are registered for all modules at once, which a block's children are among. Those of torch itself only watch."""
    for hooks in HOOKS:
        for hook in getattr(nn.modules.module, f"_global{hooks}").values():
            if not (owner(hook) or "").startswith("torch."):
                raise NotImplementedError(f"no hooks must be on all modules, got {hooks.strip('_')}, which would be skipped in children")


def owner(hook: Any) -> str | None:
    """The module that a hook's function is defined in."""
    return getattr(getattr(hook, "func", hook), "__module__", None)


def _parameters(name: str, module: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor):
        raise NotImplementedError(f"{name}.weight must be a tensor, got {weight}")
    for part, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        # Fake tensors stand for plain ones; any other subclass (DTensor, quantised) means arithmetic that the engine would skip.
        if type(tensor) not in (nn.Parameter, Tensor) and not type(tensor).__module__.startswith("torch._subclasses."):
            raise NotImplementedError(f"{name}.{part} must be a plain tensor, got {type(tensor).__name__}")
        if not is_floating(tensor):
            raise NotImplementedError(f"{name}.{part} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")
        expected = shape if part == "weight" else shape[:1]
        if tensor.shape != expected:
            raise ValueError(f"{name}.{part} must have shape {list(expected)}, got {list(tensor.shape)}")
    return weight, bias
