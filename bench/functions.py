"""How a function becomes a case: with its gradients through autograd, or on plain tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import peers
from bench.clock import Work
from bench.harness import Case, Provider

TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
Tensors = dict[str, Tensor]


def draw(*shape: int, like: Any, seed: int, scale: float = 1.0) -> Tensor:
    """Random numbers that depend on `seed` alone, on the device and in the dtype of the shape `like`."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=like.device) * scale).to(like.dtype)


def differentiated(forward: Callable[..., Tensor], inputs: Tensors, grad: Tensor, only: str = "") -> Work:
    """Work of a function of `inputs` and its gradients: both passes, or `only` the "forward" or the "backward" one."""
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    ignored = [] if only else leaves

    def whole() -> Tensor:
        return forward(*leaves)

    def backward(y: Tensor) -> Tensors:
        gradients = torch.autograd.grad(y, leaves, grad)
        return {f"d{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}

    if only == "forward":
        return Work(lambda _: {"out": whole().detach()}, forward=whole, ignored=leaves)
    if only == "backward":
        return Work(backward, before=whole)

    def both(_: None) -> Tensors:
        y = whole()
        return {"out": y.detach(), **backward(y)}

    return Work(both, forward=whole, ignored=ignored)


def computed(
    function: Callable[..., Tensor], make: Callable[[Any], tuple[Tensors, Tensor]], only: str, dtype: torch.dtype, shape: Any
) -> Tensors:
    """The results of `function` at `shape`, on the same inputs widened to `dtype`."""
    inputs, grad = make(shape)
    work = differentiated(function, {name: x.to(dtype) for name, x in inputs.items()}, grad.to(dtype), only)
    return work.run(work.before())


def case(
    name: str, shape: Any, check_shape: Any, make: Callable[[Any], tuple[Tensors, Tensor]], written_out: Callable[..., Tensor],
    functions: dict[str, Callable[[Any], Callable[..., Tensor]] | Provider], only: str = "", **figures: Any,
) -> Case:
    """A case of a differentiable function: `written_out` is the truth, `functions` gives one to a shape, by provider."""

    def provider(entry: Callable[[Any], Callable[..., Tensor]] | Provider) -> Provider:
        if isinstance(entry, Provider):
            return entry
        return Provider(lambda shape: differentiated(entry(shape), *make(shape), only))

    return Case(
        name, shape, check_shape,
        truth=partial(computed, written_out, make, only, torch.float64),
        eager=partial(computed, written_out, make, only, shape.dtype),
        providers={label: provider(entry) for label, entry in functions.items()},
        tolerance=TOLERANCE[shape.dtype], **figures,
    )  # fmt: skip


def raw(make: Callable[[Any], Tensors], call: Callable[..., Tensors], shape: Any) -> Work:
    """Work of a function on plain tensors, without autograd."""
    tensors = make(shape)
    return Work(lambda _: call(**tensors))


def raw_case(
    name: str, shape: Any, make: Callable[[Any], Tensors], written_out: Callable[..., Tensors], ours: Callable[..., Tensors],
    others: dict[str, Provider], eager: Callable[..., Tensors] | None = None, **figures: Any,
) -> Case:
    """A case of a kernel of ours, called as a backend is, without autograd. `eager`, also compiled, takes part as PyTorch's way."""
    device, eager = shape.device, eager or written_out
    backend = peers.backend_for(device)

    def result(dtype: torch.dtype, shape: Any) -> Tensors:
        return written_out(**{name: x.to(dtype) for name, x in make(shape).items()})

    return Case(
        name, shape, shape, partial(result, torch.float64), partial(result, shape.dtype),
        {
            f"ours: {backend}": peers.ours(backend, device, partial(raw, make, ours)),
            "eager": Provider(partial(raw, make, eager)),
            "torch.compile": Provider(lambda shape: raw(make, peers.compiled(eager, device), shape)),
            **others,
        },
        **{"tolerance": TOLERANCE[shape.dtype], **figures},
    )  # fmt: skip
