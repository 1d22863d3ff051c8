"""One training step of a model, with everything noted that recomputing its blocks must not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_iter, tree_map

from . import rng

Loss = Callable[[Any], Tensor]


class Step(NamedTuple):
    """What one forward and backward pass gave."""

    outputs: dict[str, Tensor]
    """Floating-point tensors of the output, by their path in it; zero where the batch's attention mask says that there is padding."""
    loss: Tensor
    gradients: dict[str, Tensor | None]
    """Of every parameter, by name."""
    buffers: dict[str, Tensor]
    generators: tuple[Tensor, ...]
    """The states of all default generators after the step."""
    hooks: dict[str, int]
    """How often the gradient of each parameter was handed over."""


def run(model: nn.Module, batch: Any, loss: Loss, start: rng.RngState) -> Step:
    """A step of `model` on `batch` from the random state `start`. Leaves gradients, buffers and generators as they were."""
    hooks = {name: 0 for name, _ in model.named_parameters()}
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_counter(hooks, name)).remove)
        stack.enter_context(start.replay())
        output = call(model, batch)
        value = loss(output)
        if value.requires_grad:  # a wrong swap may have cut it off from every parameter
            value.backward()
        generators = tuple(state.clone() for _, state in rng.capture().generators)
        return Step(
            {path: _seen(tensor.detach(), batch) for path, tensor in _floating(output)}, value.detach().clone(),
            {name: None if p.grad is None else p.grad.detach() for name, p in model.named_parameters()},
            {name: buffer.detach().clone() for name, buffer in model.named_buffers()}, generators, hooks,
        )  # fmt: skip


def is_random(model: nn.Module, batch: Any, start: rng.RngState) -> bool:
    """Whether a forward pass draws random numbers."""
    with undisturbed(model), torch.no_grad(), start.replay():
        before = rng.capture()
        call(model, batch)
        after = rng.capture()
        return any(not torch.equal(a, b) for (_, a), (_, b) in zip(before.generators, after.generators, strict=True))


def drawing(model: nn.Module, names: Sequence[str], batch: Any, start: rng.RngState) -> list[str]:
    """Those of the modules `names` that draw random numbers in a forward pass with gradients on."""
    before: dict[str, rng.RngState] = {}
    found: list[str] = []

    def note(name: str) -> None:
        states = zip(before[name].generators, rng.capture().generators, strict=True)
        if name not in found and any(not torch.equal(a, b) for (_, a), (_, b) in states):
            found.append(name)

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(lambda *_, name=name: before.update({name: rng.capture()})).remove)
            stack.callback(module.register_forward_hook(lambda *_, name=name: note(name)).remove)
        stack.enter_context(undisturbed(model))
        stack.enter_context(start.replay())
        call(model, batch)
    return found


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output; a mapping gives keyword arguments, a tuple or list positional ones, anything else is the only argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def widened(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    return tree_map(lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch)


def default_loss(output: Any) -> Tensor:
    """The output's own loss, where it has one; else a mean of all its floating-point elements, each with a weight of its own.

    Raises ValueError where there is neither.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own.mean()
    terms = [tensor for _, tensor in _floating(output)]
    if not terms:
        raise ValueError("the model's output must have a loss or a floating-point tensor, got neither: pass loss=")
    return torch.stack([_weighted_mean(term) for term in terms]).sum()


def tokens(batch: Any) -> int:
    """About how many rows are summed in a weight's gradient: the two leading axes of the batch's largest tensor."""
    return max((math.prod(leaf.shape[:2]) for leaf in tree_iter(batch) if isinstance(leaf, Tensor)), default=1)


def _weighted_mean(x: Tensor) -> Tensor:
    weights = torch.cos(torch.arange(x.numel(), device=x.device, dtype=torch.float32)).view(x.shape)
    return (x * weights.to(torch.promote_types(x.dtype, torch.float32))).mean()


def _floating(output: Any) -> Iterator[tuple[str, Tensor]]:
    leaves = [((), output)] if isinstance(output, Tensor) else tree_flatten_with_path(output)[0]
    for path, leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield keystr(path) or "output", leaf


def _seen(output: Tensor, batch: Any) -> Tensor:
    """A copy of `output [B, T, ...]`, zero at padding: what attention makes of a token that sees no key differs by implementation."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or output.shape[:2] != mask.shape:
        return output.clone()
    return output.masked_fill((mask == 0).view(*mask.shape, *[1] * (output.dim() - 2)), 0)


def _counter(counts: dict[str, int], name: str) -> Callable[[Tensor], None]:
    def count(parameter: Tensor) -> None:
        counts[name] += 1

    return count


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Parameters without gradients inside; afterwards gradients and buffers are what they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers: Sequence[tuple[Tensor, Tensor]] = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
