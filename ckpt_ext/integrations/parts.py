"""Reads norms, activations and dropouts out of a layer's children, and refuses by name what the engine could not honour."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .. import dtensors
from ..adopt import HOOKS, owner
from ..spec import GATED_ACTIVATIONS
from ..validate import is_floating
from ..weights import NormWeights

_RECORDER = "transformers.utils.output_capturing"
"""Hooks of this module record outputs while a model was asked for them (`output_attentions`), and do nothing otherwise."""

_OF_ONE_CALL = "peft.tuners.lora.model"
"""Hooks of this module are there for the time of one forward pass (`adapter_names`), and gone in backward."""


class OneCall(NotImplementedError):
    """What departs from a block in this call may be gone in backward, so that nothing may be run again there."""


_ACTIVATIONS: dict[str, str | Callable[[Any], str]] = {
    "transformers.activations.SiLUActivation": "silu",
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "torch.nn.modules.activation.GELU": lambda module: "gelu_tanh" if module.approximate == "tanh" else "gelu",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.FastGELUActivation": "gelu_tanh",  # its sqrt(2 / pi) ends after ten digits
    "torch.nn.modules.activation.ReLU": "relu",
    "transformers.activations.ReLUSquaredActivation": "relu2",
}
_GATED = {pointwise: gated for gated, pointwise in GATED_ACTIVATIONS.items()}


def class_path(kind: type) -> str:
    """A class's full name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def plain(name: str, module: Any, kind: str) -> None:
    """Refuse, with NotImplementedError, a module that is not exactly of the class `kind`, or has hooks or a forward of its own."""
    if class_path(type(module)) != kind:
        expected, found = kind.rpartition(".")[2], type(module).__name__
        raise NotImplementedError(f"{name} must be exactly {expected}, got {class_path(type(module)) if found == expected else found}")
    untouched(name, module)
    own_forward(name, type(module))


def untouched(name: str, module: nn.Module) -> None:
    """Refuse a module with hooks, or with a forward of its own, which would be skipped."""
    for hooks in HOOKS:
        for hook in getattr(module, hooks).values():
            if owner(hook) == _OF_ONE_CALL:
                raise OneCall(f"{name} must have the same adapters for all rows, got adapter_names or offsets")
            if owner(hook) != _RECORDER and not dtensors.keeps_replicated(hook):
                raise NotImplementedError(f"{name} must have no hooks, got {hooks.strip('_')}, which would be skipped")
    if "forward" in module.__dict__:
        raise NotImplementedError(f"{name} must keep its class's forward, got one of its own, which would be skipped")


def own_forward(name: str, kind: type) -> None:
    """Refuse a class whose forward is defined in another module than the class that has it: somebody's patch."""
    if torch.compiler.is_compiling():  # the compiler follows what children call, not what their classes' functions are
        return
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), kind)
    place = getattr(vars(owner).get("forward"), "__module__", owner.__module__)
    if place != owner.__module__:
        raise NotImplementedError(f"{name} must have the forward of {kind.__name__}, got a patched one of {place}, which would be skipped")


def own_functions(module: str, implementation: str) -> None:
    """Refuse what is patched of the functions that the layers defined in `module` call: rotary embedding and attention.

    Attention is looked up by the name of its implementation, under which sequence parallelism, for one, puts its own.
    """
    if torch.compiler.is_compiling():
        return
    names = ("apply_rotary_pos_emb", "eager_attention_forward") if implementation == "eager" else ("apply_rotary_pos_emb",)
    called = {name: (vars(sys.modules[module]).get(name), module) for name in names}
    if implementation != "eager":
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        called[implementation] = (ALL_ATTENTION_FUNCTIONS.get(implementation), "transformers.integrations")
    for name, (function, place) in called.items():
        # Of other kinds than functions are the library's own wrappers, for kernels from its hub.
        if isinstance(function, FunctionType) and not f"{function.__module__}.".startswith(f"{place}."):
            raise NotImplementedError(f"{name} must be the library's, got a patched one of {function.__module__}, which would be skipped")


def has_hooks_of_one_call(module: nn.Module) -> bool:
    """Whether hooks below `module` are gone in backward, so that its forward must not be run again there."""
    return any(owner(hook) == _OF_ONE_CALL for child in module.modules() for hook in child._forward_pre_hooks.values())


def tensors(name: str, weight: Any, bias: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """`weight` of `shape` and `bias` of its first axis or None, refused where they are no plain floating-point tensors of that shape."""
    for part, tensor, expected in (("weight", weight, shape), ("bias", bias, shape[:1])):
        if tensor is None and part == "bias":
            continue
        # Fake tensors stand for plain ones; any other subclass (DTensor, quantised) means arithmetic that the engine would skip.
        if type(tensor) not in (nn.Parameter, Tensor) and not type(tensor).__module__.startswith("torch._subclasses."):
            raise NotImplementedError(f"{name}.{part} must be a plain tensor, got {type(tensor).__name__}")
        if not is_floating(tensor):
            raise NotImplementedError(f"{name}.{part} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.shape != expected:
            raise NotImplementedError(f"{name}.{part} must have shape {list(expected)}, got {list(tensor.shape)}")
    return weight, bias


def epsilon(name: str, module: nn.Module) -> float:
    """What the norm adds to the variance; the classes of transformers have two names for it."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        raise NotImplementedError(f"{name} must have an epsilon, got {eps}")
    return eps


def norm(name: str, module: nn.Module, kind: str, eps: float, width: int) -> NormWeights:
    """Scale and shift, `width` wide, of a norm of the class `kind` and the block's `eps`."""
    plain(name, module, kind)
    if epsilon(name, module) != eps:
        raise NotImplementedError(f"{name} must have the epsilon of the block's first norm, {eps}, got {epsilon(name, module)}")
    weight, bias = tensors(name, getattr(module, "weight", None), getattr(module, "bias", None), (width,))
    return NormWeights(weight, bias)


def activation(name: str, module: Any) -> str:
    """The elementwise function, one of `spec.PLAIN_ACTIVATIONS`, that `module` is."""
    found = _ACTIVATIONS.get(class_path(type(module)))
    if found is None:
        known = sorted({value for value in _ACTIVATIONS.values() if isinstance(value, str)})
        raise NotImplementedError(f"{name} must be one of {', '.join(known)}, got {type(module).__name__}")
    untouched(name, module)
    own_forward(name, type(module))
    return found if isinstance(found, str) else found(module)


def gated(pointwise: str) -> str:
    """The gated MLP of an elementwise function."""
    return _GATED[pointwise]


def probability(name: str, place: Any) -> float:
    """The probability that `place`, a number or an `nn.Dropout`, holds."""
    if isinstance(place, nn.Module):
        plain(name, place, "torch.nn.modules.dropout.Dropout")
        return place.p  # type: ignore[return-value]
    return place


def active_probability(name: str, module: nn.Module) -> float:
    """The same of an `nn.Dropout`, zero where it is not in training."""
    p = probability(name, module)
    return p if module.training else 0.0


def width(name: str, module: nn.Module) -> int:
    """How wide the inputs of a linear child are: `nn.Linear`'s and its like, and the transposed one of GPT-2."""
    size = getattr(module, "in_features", getattr(module, "nx", None))
    if not isinstance(size, int):
        raise NotImplementedError(f"{name} must be a linear layer, got {type(module).__name__}")
    return size
