"""Checkpointing of any function: keep its inputs, run it again in backward, with the same randomness, autocast and buffers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from . import rng
from .replay import Region
from .surroundings import Defaults, ModuleState, devices_of

# What torch.utils.checkpoint takes by keyword for itself, and the values of it that say what this function does anyway.
_TORCH_OPTIONS: dict[str, tuple[object, ...]] = {
    "use_reentrant": (False, None),
    "preserve_rng_state": (True,),
    "determinism_check": ("default",),
    "debug": (False,),
    "early_stop": (True,),
}
_LEAVES = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    generators: Iterable[torch.Generator] = (),
    python: bool = False,
    numpy: bool = False,
    check: Literal["values"] | None = None,
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, of which only the tensors among the arguments and some random states are kept for backward.

    Backward runs the function again, as far as it needs, and gives the gradients of the call without checkpointing. Arguments and
    results may nest in lists, tuples, dicts, dataclasses and what torch's pytrees know. Without grad mode the function is just called.

    The replay finds again
    - the states of the CPU's generator, of the default generators of all devices of the arguments' and modules' tensors (of all
      initialised devices where no module is known), of `generators`, and, on request, of `random` (`python`) and NumPy's legacy one
      (`numpy`). Afterwards they are as without checkpointing. Threads that draw from one generator at the same time cannot be replayed.
    - autocast, torch's default dtype and default device;
    - registered buffers of the known modules, with their values before the call; they end as after one call. `ModuleState` says how.
    Known are modules that are the function, its `self` if it is a method, or (parts of) its arguments, `functools.partial` looked through.
    What a closure holds cannot be known, nor what is no tensor: a counter that is a Python int counts twice. Forward hooks run twice, too.

    A parameter, buffer or argument that was changed in place since the call raises `ReplayMismatch`, and so does a replay that saves
    other shapes or dtypes. `check="values"` compares exact checksums of all that is saved, too, for which it is read twice; an
    operation that leaves its workspace partly unset (an LSTM on the CPU) counts as a difference.

    torch's options are accepted where they say what happens anyway (`use_reentrant=False`), so that this can stand in for
    `torch.utils.checkpoint.checkpoint`. `torch.compile` leaves the call uncompiled.

    Raises ValueError for options that contradict, and NotImplementedError for a device without a generator.
    """
    generators = _checked(generators, check, kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # A graph cannot hold what forward notes down for backward. The decorator would import the compiler with this package.
    run = torch.compiler.disable(_checkpoint) if torch.compiler.is_compiling() else _checkpoint
    return run(function, args, kwargs, generators, python, numpy, check == "values")


def _checked(generators: Iterable[torch.Generator], check: object, kwargs: dict[str, Any]) -> tuple[torch.Generator, ...]:
    if check not in (None, "values"):
        raise ValueError(f"check must be None or 'values', got {check!r}")
    given = (generators,) if isinstance(generators, str) or not isinstance(generators, Iterable) else tuple(generators)
    if given and (given[0] is generators or not all(isinstance(generator, torch.Generator) for generator in given)):
        raise ValueError(f"generators must be a sequence of torch.Generator, got {generators!r}")
    for name in kwargs.keys() & _TORCH_OPTIONS.keys():
        if (value := kwargs.pop(name)) not in _TORCH_OPTIONS[name]:
            raise ValueError(f"{name} must be {_TORCH_OPTIONS[name][0]!r} in ckpt_ext.checkpoint, got {value!r}")
    if "context_fn" in kwargs:
        raise ValueError(f"context_fn must not be given to ckpt_ext.checkpoint, got {kwargs['context_fn']!r}")
    return given


def _checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    generators: tuple[torch.Generator, ...],
    python: bool,
    numpy: bool,
    check_values: bool,
) -> Any:
    while type(function) is functools.partial:
        args, kwargs, function = function.args + args, {**function.keywords, **kwargs}, function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    found = _Found(modules=[owner] if isinstance(owner, nn.Module) else [])
    tree = _lift((args, kwargs), found)
    state = ModuleState(found.modules)
    used = [*found.tensors, *found.inference, *state.tensors]
    if isinstance(owner, nn.Module) and not any(tensor.requires_grad for tensor in used):
        return function(*args, **kwargs)

    devices = devices_of(used)
    if not found.modules:  # a closure may hold anything
        devices.update(rng.initialised_devices())
    randomness = rng.capture(list(devices), generators, python=python, numpy=numpy)
    defaults = Defaults.present({"cpu", *(device.type for device in devices), *(tensor.device.type for tensor in found.tensors)})

    def replay(*tensors: Tensor) -> None:
        again, options = _rebuild(tree, tensors)
        with ExitStack() as stack:
            stack.enter_context(state.replay())
            stack.enter_context(defaults.replay())
            stack.enter_context(randomness.replay())
            function(*again, **options)

    region = Region(replay, found.tensors, check_values=check_values, modules=found.modules)
    with region.forward():
        result = function(*args, **kwargs)
    state.settle()
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """What lies in the arguments."""

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    inference: list[Tensor] = dataclasses.field(default_factory=list)
    modules: list[nn.Module] = dataclasses.field(default_factory=list)


class _Place(NamedTuple):
    """Where a tensor goes."""

    position: int


class _Fields(NamedTuple):
    """A dataclass without its fields, and these."""

    blank: Any
    values: dict[str, Any]


class _Node(NamedTuple):
    """Something that torch's pytrees can take apart, and its leaves."""

    spec: Any
    leaves: list[Any]


def _lift(value: Any, found: _Found) -> Any:
    """`value` with a `_Place` for each tensor, which goes into `found`. Containers are new, so that nobody's later changes reach them."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, Tensor):
        if value.is_inference():  # autograd saves none, and nobody can change it
            found.inference.append(value)
            return value
        found.tensors.append(value)
        return _Place(len(found.tensors) - 1)
    if kind is list or kind is tuple:
        return kind([_lift(item, found) for item in value])
    if kind is dict:
        return {key: _lift(item, found) for key, item in value.items()}
    if isinstance(value, nn.Module):
        found.modules.append(value)
        return value
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value
    leaves, spec = _pytree.tree_flatten(value)
    if not (len(leaves) == 1 and leaves[0] is value):
        return _Node(spec, [_lift(leaf, found) for leaf in leaves])
    if dataclasses.is_dataclass(value):
        return _lift_fields(value, found)
    return value


def _lift_fields(value: Any, found: _Found) -> Any:
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
    before = len(found.tensors)
    values = {name: _lift(item, found) for name, item in values.items()}
    if len(found.tensors) == before:
        return value
    blank = copy.copy(value)
    for name in values:
        object.__setattr__(blank, name, None)  # or it would keep the tensors alive; frozen ones, too
    return _Fields(blank, values)


def _rebuild(tree: Any, tensors: tuple[Tensor, ...]) -> Any:
    kind = type(tree)
    if kind is _Place:
        return tensors[tree.position]
    if kind is list or kind is tuple:
        return kind([_rebuild(item, tensors) for item in tree])
    if kind is dict:
        return {key: _rebuild(item, tensors) for key, item in tree.items()}
    if kind is _Fields:
        value = copy.copy(tree.blank)
        for name, item in tree.values.items():
            object.__setattr__(value, name, _rebuild(item, tensors))
        return value
    if kind is _Node:
        return _pytree.tree_unflatten([_rebuild(leaf, tensors) for leaf in tree.leaves], tree.spec)
    return tree
