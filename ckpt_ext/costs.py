"""What a block takes under each policy, in bytes and seconds: the figures that `plan` and `fit` reason with.

Bytes are counted, not modelled: one block runs forward and backward on tensors without data, at the very length that is asked about, as one
of a chain. For device="cpu" these are fake tensors of the CPU, through ATen's operators, slow where a block is large; for "cuda" they are
meta tensors, through the backend that allocates what the Triton kernels' launchers do (`ckpt_ext.backends.outline`), in milliseconds.

Seconds are FLOPs over a rate that the caller gives, an assumption by default; or, on request, a small block is timed on this machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from . import rope
from .autograd import BlockFunction
from .backends import select
from .call import BlockCall, Shared
from .modules import TransformerBlock
from .shapes import block_parameters
from .sites import drops
from .slicing import slicing
from .spec import BlockSpec, Policy
from .tracing import Bytes, fake_tensors, trace
from .validate import one_of, positive_int

DeviceKind = Literal["cpu", "cuda"]
POLICIES = tuple(Policy(save) for save in ("input", "attention", "all")) + (Policy("input", offload=True),)
_MOST_TIMED = 1 << 30
"""Bytes that a block may take to be timed."""


class Cost(NamedTuple):
    """What one block takes under one policy; bytes are the device's."""

    saved: int
    """Kept from its forward to its backward, its input included where that stays on the device."""
    forward: int
    """The most that is alive in its forward pass, its input and output included, beside what earlier blocks keep."""
    backward: int
    """The most that is alive in its backward pass, what it kept, the gradients of its output, input and parameters included, beside what
    earlier blocks keep and the gradients of later blocks' parameters."""
    seconds: float
    """Its forward and backward pass, with what is computed again."""


class BlockCosts(NamedTuple):
    """One block of a chain."""

    input: int
    """Bytes of its input."""
    gradients: int
    """Bytes of its parameters' gradients, which stay to the end of the backward pass."""
    forward_seconds: float
    """Its forward pass alone: what it takes to rebuild the input of the next block in a segment."""
    options: Mapping[Policy, Cost]
    """The policies that it may be given."""


class Rates(NamedTuple):
    """How fast a device is. The defaults are round figures below what vendors state for an H100; nothing of them is measured."""

    flops: float = 4e14
    """FLOP/s of matrix products and attention; other operators are taken for free."""
    host: float = 5e10
    """Bytes/s between device and host, each way."""


def block_costs(
    spec: BlockSpec, batch: int, length: int, *, dtype: torch.dtype = torch.bfloat16, trained: bool = True,
    policies: Iterable[Policy] = POLICIES, device: DeviceKind = "cpu", rates: Rates | None = None, timed: bool = False,
) -> BlockCosts:  # fmt: skip
    """The costs of a block on `[batch, length, spec.dim]` in `dtype`, of a chain whose other blocks' tensors are none of it.

    A chain's peak is the greatest of `fixed + saved of earlier blocks + max(forward, backward + gradients of later blocks)`; the tables of
    angles that blocks share (`shared_bytes`) are part of `fixed`. Dropout is on where the spec has any. Where not `trained`, the parameters
    are frozen, and the input is differentiated all the same.

    What an offloaded input takes is not counted in a run, but put together: nothing stays on the device; in forward, the input before has
    not left and two more may be on their way; in backward, the one before is fetched ahead. A transfer takes time as far as it is longer
    than the forward pass that hides it.

    With `timed`, seconds are the median of a block's steps on this machine, on `device`; raises ValueError where that would take more than
    1 GiB. Raises ValueError for sizes that are no positive ints or an unknown device.
    """
    positive_int("batch", batch)
    positive_int("length", length)
    one_of("device", device, get_args(DeviceKind))
    rates = rates or Rates()
    options: dict[Policy, Cost] = {}
    size = batch * length * spec.dim * dtype.itemsize
    forward_seconds = _flops(spec, batch, length, "all", trained)[0] / rates.flops
    for policy in policies:
        found = block_bytes(spec, batch, length, policy, dtype=dtype, trained=trained, device=device)
        seconds = sum(_flops(spec, batch, length, policy.save, trained)) / rates.flops
        if timed:
            forward_seconds, seconds = _timed(spec, batch, length, dtype, trained, device, replace(policy, offload=False), max(found))
        if policy.offload:
            seconds += 2 * max(0.0, size / rates.host - forward_seconds)
        options[policy] = Cost(*found, seconds)
    return BlockCosts(size, block_parameters(spec) * dtype.itemsize if trained else 0, forward_seconds, options)


def block_bytes(
    spec: BlockSpec, batch: int, length: int, policy: Policy, *, dtype: torch.dtype = torch.bfloat16, trained: bool = True,
    device: DeviceKind = "cpu",
) -> Bytes:  # fmt: skip
    """The bytes of `block_costs` for one policy."""
    found = _traced(spec, batch, length, dtype, trained, device, replace(policy, offload=False))
    return offloaded(found, batch * length * spec.dim * dtype.itemsize) if policy.offload else found


def offloaded(found: Bytes, size: int) -> Bytes:
    """The bytes of a block that keeps its input, of `size`, once that waits in the host's memory; `block_costs` says how."""
    return Bytes(found.saved - size, found.forward + 3 * size, found.backward + size)


def shared_bytes(specs: Iterable[BlockSpec], length: int) -> int:
    """Bytes of the tables of angles that the blocks of a model share, float32 cosines and sines."""
    tables = {(spec.rope_dim, spec.rope_theta) for spec in specs if spec.rope_theta is not None}
    return sum(length * dim * 4 for dim, _ in tables)


@lru_cache(maxsize=4096)
def _traced(
    spec: BlockSpec, batch: int, length: int, dtype: torch.dtype, trained: bool, device: DeviceKind, policy: Policy
) -> Bytes:  # fmt: skip
    if device == "cpu":
        mode: AbstractContextManager = fake_tensors()
        where = "cpu"
    else:
        mode, where = nullcontext(), "meta"
        # Kernels keep no scores and no mask, so these change no byte.
        spec = replace(spec, window=None, softcap=None)
    with mode:
        block = _block(spec, dtype, where, policy).requires_grad_(trained)
        table = [t for t in rope.table(spec, length, dtype, torch.device(where)) if t is not None]
        return trace(lambda x: _run(block, x), (batch, length, spec.dim), dtype, where, [*block.parameters(), *table])


def _block(spec: BlockSpec, dtype: torch.dtype, device: str, policy: Policy | None = None) -> TransformerBlock:
    return TransformerBlock(spec, policy=policy, dtype=dtype, device=device)


def _run(block: TransformerBlock, x: Tensor) -> Tensor:
    """`block(x)`, dropout included where x is a meta tensor: that device has no generator to reserve masks in."""
    if x.device.type != "meta" or not drops(block.spec):
        return block(x)
    weights, policy = block.weights(), block.policy
    layout, tensors = weights.flatten()
    cut = slicing(block.spec, x.size(0) * x.size(1), x.device, policy.slices, x.dtype, weights)
    call = BlockCall(block.spec, policy.save, select("auto", x.device), layout, x.dtype, cut)
    state = torch.empty(2, dtype=torch.int64, device=x.device)
    return BlockFunction.apply(call, None, x, *Shared(*rope.table(block.spec, x.size(1), x.dtype, x.device), state), *tensors)


@lru_cache(maxsize=4096)
def _flops(spec: BlockSpec, batch: int, length: int, save: str, trained: bool) -> tuple[float, float]:
    """FLOPs of a block's forward and backward pass: of linear layers counted as they run, of attention by the pairs that see each other.

    A pair takes two products of head_dim elements in forward, and seven in our backward kernels, which make scores twice.
    """
    block = _block(spec, torch.bfloat16, "meta", Policy(save)).requires_grad_(trained)  # type: ignore[arg-type]
    x = torch.empty(batch, length, spec.dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = _run(block, x)
        forward = counter.get_total_flops()
        y.sum().backward()
        backward = counter.get_total_flops() - forward
    pair = 2 * batch * spec.heads * spec.head_dim * visible_pairs(spec, length)
    return forward + 2 * pair, backward + (7 + 2 * (save == "input")) * pair


def visible_pairs(spec: BlockSpec, length: int) -> int:
    """How many keys the queries of a row see in all."""
    seen = min(length, spec.window or length)
    # Queries see themselves and up to seen - 1 others behind: a triangle, then a band.
    behind = seen * (seen + 1) // 2 + (length - seen) * seen
    return behind if spec.causal else 2 * behind - length


def _timed(
    spec: BlockSpec, batch: int, length: int, dtype: torch.dtype, trained: bool, device: DeviceKind, policy: Policy, peak: int
) -> tuple[float, float]:
    """Seconds of a forward pass, and of that and backward: medians of five on this machine, after two to warm up."""
    if peak > _MOST_TIMED:
        raise ValueError(f"timed must be False where a block takes more than {_MOST_TIMED} bytes, got one of {peak}")
    block = _block(spec, dtype, device, policy).requires_grad_(trained)
    x = torch.randn(batch, length, spec.dim, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn_like(x)
    forward, step = [], []
    for index in range(7):
        start = _now(device)
        y = block(x)
        middle = _now(device)
        y.backward(grad)
        if index >= 2:
            forward.append(middle - start)
            step.append(_now(device) - start)
    return statistics.median(forward), statistics.median(step)


def _now(device: DeviceKind) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
