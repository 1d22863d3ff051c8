"""Reads linear modules that `torch.distributed.tensor.parallel.parallelize_module` has cut across ranks: a rank's share, as a projection.

Such a module has DTensors for parameters, and hooks that make DTensors of its input and a tensor of its output. The engine steps around
them, so they must be those of `ColwiseParallel()` or `RowwiseParallel()` with the layouts that these have by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .projections import Dense
from .tensor_parallel import Share, TensorParallel
from .validate import is_floating

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MARK = "_distribute_module_applied"
"""What `distribute_module`, by which parallel styles are applied, leaves on a module."""
_STYLES = "torch.distributed.tensor.parallel.style"


def is_distributed(module: Any) -> bool:
    """Whether a parallel style has been applied to `module`."""
    return isinstance(module, nn.Module) and bool(getattr(module, _MARK, False))


def linear(name: str, module: nn.Linear, shape: tuple[int, int]) -> Dense:
    """This rank's share of a column-wise or row-wise parallel `nn.Linear`, `shape` `(out, in)` as a whole.

    Its gradients are those of the DTensors. Raises NotImplementedError, by name, for any other style, layout, mesh or class.
    """
    # Hooks and meshes are not for a graph to hold. The decorator would import the compiler with this package.
    read = torch.compiler.disable(_linear) if torch.compiler.is_compiling() else _linear
    return read(name, module, shape)


def _linear(name: str, module: nn.Linear, shape: tuple[int, int]) -> Dense:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        got = "a forward of its own" if type(module) is nn.Linear else type(module).__name__
        raise NotImplementedError(f"{name} must be exactly Linear to be tensor parallel, got {got}")
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    weight, bias = module.weight, module.bias
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1:
        got = f"a mesh of {weight.device_mesh.ndim} dimensions" if isinstance(weight, DTensor) else type(weight).__name__
        raise NotImplementedError(f"{name}.weight must be a DTensor on a mesh of one dimension, got {got}")
    if weight.shape != shape or not is_floating(weight):
        raise NotImplementedError(f"{name}.weight must be floating of shape {list(shape)}, got {weight.dtype} {list(weight.shape)}")
    column, row = ColwiseParallel(), RowwiseParallel()
    # What the two styles give to `distribute_module`: static functions and the layouts that they are called with.
    expected: dict[Any, Any] = {
        (Shard(0),): ("out", Shard(0), _Calls(
            (ColwiseParallel._prepare_input_fn, (column.input_layouts, column.desired_input_layouts)),
            (ColwiseParallel._prepare_output_fn, (column.output_layouts, True)),
        )),
        (Shard(1),): ("in", Replicate(), _Calls(
            (RowwiseParallel._prepare_input_fn, (row.input_layouts, row.input_layouts)),
            (RowwiseParallel._prepare_output_fn, (row.output_layouts, True)),
        )),
    }  # fmt: skip
    if tuple(weight.placements) not in expected:
        raise NotImplementedError(f"{name}.weight must be sharded along one of its axes, got {weight.placements}")
    cut, bias_placement, calls = expected[tuple(weight.placements)]
    _check_hooks(name, module, calls)
    if bias is not None and (
        not isinstance(bias, DTensor) or bias.device_mesh != weight.device_mesh or tuple(bias.placements) != (bias_placement,)
    ):
        raise NotImplementedError(f"{name}.bias must be a DTensor placed as {bias_placement}, got {type(bias).__name__}")
    mesh = weight.device_mesh
    if shape[cut == "in"] % mesh.size():
        raise NotImplementedError(f"{name}.weight must be cut evenly across {mesh.size()} ranks, got {list(shape)}")
    across = TensorParallel(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    return Dense(_local(weight), None if bias is None else _local(bias), Share(across, cut))


def _local(tensor: DTensor) -> Tensor:
    return tensor.to_local()


class _Calls:
    """The functions, with the arguments they are bound to, that a style calls before and behind a module's forward."""

    def __init__(self, before: tuple[Callable, tuple], behind: tuple[Callable, tuple]) -> None:
        self.before, self.behind = before, behind


def _check_hooks(name: str, module: nn.Module, calls: _Calls) -> None:
    """Refuse any hooks but those of `calls`."""
    for hooks, wanted in (
        (module._forward_pre_hooks, [calls.before]), (module._forward_hooks, [calls.behind]),
        (module._backward_pre_hooks, []), (module._backward_hooks, []),
    ):  # fmt: skip
        found = [_bound(hook) for hook in hooks.values()]
        if found != wanted:
            raise NotImplementedError(
                f"{name} must have the hooks of ColwiseParallel() or RowwiseParallel() with their default layouts alone, got others"
            )


def keeps_replicated(hook: Any) -> bool:
    """Whether a hook is `PrepareModuleInput`'s for inputs that every rank has whole, and wants whole: it changes no value."""
    if not getattr(hook, "__qualname__", "").startswith("PrepareModuleInput._apply.") or hook.__module__ != _STYLES:
        return False
    style = _inside(hook)["self"]
    pairs = list(zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True))
    pairs += [(layout, style.desired_input_kwarg_layouts.get(name)) for name, layout in style.input_kwarg_layouts.items()]
    return all(layout is None or (layout.is_replicate() and wanted is not None and wanted.is_replicate()) for layout, wanted in pairs)


def _inside(function: Any) -> Mapping[str, Any]:
    """What a function has closed over, by name."""
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


def _bound(hook: Any) -> tuple[Callable, tuple] | None:
    """The function that a hook of `distribute_module` calls, and what it is bound to; None for any other hook."""
    if not getattr(hook, "__qualname__", "").startswith("distribute_module."):
        return None
    inside = _inside(hook)
    function = inside.get("input_fn", inside.get("output_fn"))
    return (function.func, function.args) if hasattr(function, "func") and not function.keywords else None
