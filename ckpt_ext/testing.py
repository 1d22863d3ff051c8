"""What tests share: inputs that show a stray read, outputs that show a missing write, blocks to compare, and the rule of accuracy."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import reference, rng
from .masks import attention_mask, full_mask
from .modules import EagerBlock, TransformerBlock
from .rng import Dropout, Site
from .spec import BlockSpec
from .validate import widened


def framed(x: Tensor) -> Tensor:
    """`x` as a slice of a larger tensor full of NaN, so that a load outside of its mask spoils the result."""
    frame = torch.full([size + 4 for size in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    inside = frame[tuple(slice(2, 2 + size) for size in x.shape)]
    return inside.copy_(x)


def poison_allocations(monkeypatch, package: str = "ckpt_ext.kernels") -> None:
    """Fill with NaN what modules of `package` get from `torch.empty` and its like, so that an element never written is seen."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            out = allocate(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return out.fill_(torch.nan) if caller.startswith(package) and out.is_floating_point() else out

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def assert_accurate(actual: Tensor, eager: Tensor, truth: Tensor, *, terms: int = 1, magnitude: float = 0.0) -> None:
    """Require `error(actual) <= 2 * error(eager) + rounding` against a float64 `truth`.

    The rounding is that of the output, once, and of sums of `terms` terms in the accumulation dtype, of values as large as the truth or
    as `magnitude`, where terms cancel.
    """
    assert actual.shape == truth.shape, f"shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    if not truth.numel():
        return
    largest = max(truth.abs().max().item(), magnitude)
    accumulator = widened(actual.dtype)
    rounding = largest * (torch.finfo(actual.dtype).eps + 4 * (terms + 2) * torch.finfo(accumulator).eps)
    error = (actual.double() - truth).abs().max().item()
    eager_error = (eager.double() - truth).abs().max().item()
    assert error <= 2 * eager_error + rounding, f"error {error:.3g} > 2 * {eager_error:.3g} (eager) + {rounding:.3g} (rounding)"


def eager_block(spec: BlockSpec, dtype: torch.dtype = torch.float64, device: str | None = None) -> EagerBlock:
    """An eager block of random parameters, always the same. None is a plain 1 or 0, which would hide that it is not used."""
    torch.manual_seed(3)
    block = EagerBlock(spec, dtype=dtype, device=device)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return block


def twin(
    block: TransformerBlock, kind: type[TransformerBlock] = TransformerBlock, dtype: torch.dtype | None = None, **arguments: Any
) -> TransformerBlock:
    """A block of `kind` with the same spec and parameters, made with `arguments`."""
    other = kind(block.spec, dtype=dtype or block.q_proj.weight.dtype, **arguments)
    other.load_state_dict(block.state_dict())
    return other


def on_both(cpu: list[tuple], gpu: list[tuple]) -> list[Any]:
    """Parameters of a test, device first: few and small ones for the interpreter, and those of a GPU."""
    import pytest

    from .kernels.launch import INTERPRETED

    usable = torch.cuda.is_available() and not INTERPRETED
    marks = [pytest.mark.gpu, pytest.mark.skipif(not usable, reason="needs a GPU, and Triton without its interpreter")]
    skip = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
    return [pytest.param("cpu", *case, marks=skip) for case in cpu] + [pytest.param("cuda", *case, marks=marks) for case in gpu]


def draw(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers that depend on `seed` alone."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=widened(dtype)).to(dtype)


def gradients(
    function: Callable[..., Tensor], inputs: Iterable[Tensor], grad: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """The output of `function` and the gradients of all inputs, computed in `dtype`; masks as after one seed."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    torch.manual_seed(7)
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))


def heads(
    device: str, dtype: torch.dtype, batch: int, heads: int, kv_heads: int, query_count: int, key_count: int, head_dim: int
) -> tuple[list[Tensor], Tensor]:
    """q, k and v as projections leave them, and the output's gradient."""
    shapes = [(query_count, heads), (key_count, kv_heads), (key_count, kv_heads), (query_count, heads)]
    drawn = (
        draw(batch, length, count, head_dim, device=device, dtype=dtype, seed=seed).transpose(1, 2)
        for seed, (length, count) in enumerate(shapes)
    )
    *inputs, grad = drawn
    return inputs, grad


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *,
    causal: bool = True, p: float = 0.0, window: int | None = None, softcap: float | None = None, **conditions: Any,
) -> Tensor:  # fmt: skip
    """Attention with every weight in memory, and the dropout masks that the kernels draw in `gradients`."""
    shape = (*q.shape[:3], k.size(2))
    mask = full_mask(attention_mask(**conditions), causal=causal, window=window, shape=shape, device=q.device)
    dropout = Dropout(rng.reserve(q.device), p, Site.FUNCTIONAL) if p else None
    return reference.attention(q, k, v, mask=mask, softcap=softcap, sinks=sinks, dropout=dropout)


class TwoLayers(nn.Module):
    """Any module that is no block of ours: two layers with dropout between; counts its calls."""

    def __init__(self, p: float = 0.5, dim: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.Dropout(p)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Tensor | float = 1.0) -> Tensor:
        self.calls += 1
        hidden = self.drop(F.gelu(self.first(x)))
        y = self.second(hidden * scale)
        return y if mask is None else y.masked_fill(mask, 0.0)


def outcome(call: Callable[[], Tensor], leaves: Sequence[Tensor], seed: int = 3) -> list[Tensor | None]:
    """`call()`, its gradients for `leaves` and what the CPU's, Python's and NumPy's generators draw next, from the same seeds."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    y = call()
    grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return [y.detach(), *grads, torch.get_rng_state(), torch.tensor(random.random()), torch.tensor(numpy.random.rand())]


def assert_same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Equal bit for bit, and None where None is expected."""
    assert len(actual) == len(expected)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one is other or (one is not None and other is not None and torch.equal(one, other)), index


def assert_compiled_as_eager(
    compiled: Callable[[Tensor], Tensor], eager: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, rtol: float = 1e-12
) -> None:
    """Outputs and gradients of two steps agree within rounding, as a compiler may sum in another order; with other masks they would not.

    The steps have masks of their own, and the generator draws the same afterwards.
    """
    runs = [_two_steps(function, module, x) for function in (compiled, eager)]
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.allclose(runs[1][0][0], runs[1][0][len(runs[1][0]) // 2])
    for actual, wanted in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=rtol, atol=rtol * wanted.abs().max().item())


def _two_steps(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    results: list[Tensor] = []
    for _ in range(2):
        y = function(x)
        results += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]
    return results, torch.randint(2**62, ())


def captured(step: Callable[[], Sequence[Tensor]], device: str) -> tuple[Sequence[Tensor], Callable[[], Any]]:
    """What `step` returns when it is captured into a CUDA graph, and a function that replays it into the same tensors."""
    if device == "cpu":
        static = step()
        return static, lambda: [old.copy_(new) for old, new in zip(static, step(), strict=True)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    return static, graph.replay


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call without checkpointing."""
    return function(*args, **kwargs)
