"""One transformer block of Llama-8B's shape, forward and backward, all weights trained: `python -m bench.block`.

The peak is beyond parameters and input, gradients included. TFLOP/s count the forward pass and twice as much for its gradients, nothing
that is run again.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench import peers
from bench.clock import Work
from bench.functions import draw
from bench.harness import Case, Provider, main
from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, rope

LLAMA = BlockSpec(dim=4096, heads=32, kv_heads=8, hidden_dim=14336, rope_theta=5e5)
SMALL = BlockSpec(dim=64, heads=4, kv_heads=2, hidden_dim=96, rope_theta=5e5)
TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-4}
PLAIN_LENGTH = 65536
"""The longest at which nothing is left to checkpointing: there is no point in running out of memory."""

Run = Callable[[nn.Module, Tensor], Tensor]


class Shape(NamedTuple):
    spec: BlockSpec
    length: int
    dtype: torch.dtype
    device: torch.device

    def flops(self) -> int:
        """Operations of the matrix products of a forward pass; causal attention computes half of its weights."""
        spec = self.spec
        width = spec.heads * spec.head_dim
        weights = spec.dim * (2 * width + 2 * spec.kv_heads * spec.head_dim + 3 * spec.hidden_dim)
        return 2 * self.length * weights + 2 * self.length**2 * width


def build(kind: type[TransformerBlock], shape: Shape, **arguments) -> TransformerBlock:
    """A block whose parameters depend on the spec and the dtype alone."""
    devices = [shape.device] if shape.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        return kind(shape.spec, dtype=shape.dtype, device=shape.device, **arguments)


def stepped(run: Run, module: nn.Module, parameters: dict[str, Tensor], x: Tensor, grad: Tensor) -> Work:
    """Forward, backward, and all gradients taken away again. `backward()` and not `grad()`: a tiled MLP adds to `.grad` by itself."""
    leaves = {"x": x.requires_grad_(), **parameters}

    def step(_: None) -> dict[str, Tensor]:
        y = run(module, x)
        y.backward(grad)
        results = {"y": y.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}
        for leaf in leaves.values():
            leaf.grad = None
        return results

    return Work(step, forward=lambda: run(module, x), ignored=list(parameters.values()))


def inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    """x and y's gradient."""
    return tuple(draw(1, shape.length, shape.spec.dim, like=shape, seed=seed) for seed in (1, 2))


def prepare(make: Callable[[Shape], tuple[nn.Module, TransformerBlock]], run: Run, shape: Shape) -> Work:
    """Work of the module that `make` gives, and whose parameters are those of the block beside it."""
    module, block = make(shape)
    table = [tensor for tensor in rope.table(shape.spec, shape.length, shape.dtype, shape.device) if tensor is not None]
    work = stepped(run, module, dict(block.named_parameters()), *inputs(shape))
    return work._replace(ignored=[*work.ignored, *table])


def written_out(dtype: torch.dtype, shape: Shape) -> dict[str, Tensor]:
    """The results of plain PyTorch in `dtype`, from the same parameters and inputs."""
    block = build(EagerBlock, shape).to(dtype)
    x, grad = (tensor.to(dtype) for tensor in inputs(shape))
    return stepped(plain, block, dict(block.named_parameters()), x, grad).run(None)


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def case(shape: Shape, check_shape: Shape) -> Case:
    """All ways to run the block at one length."""
    device = shape.device

    def eager(shape: Shape) -> tuple[nn.Module, TransformerBlock]:
        return (block := build(EagerBlock, shape)), block

    def compiled(shape: Shape) -> tuple[nn.Module, TransformerBlock]:
        block = build(EagerBlock, shape)
        return peers.compiled(block, device, dynamic=True), block

    def tiled(module: ModuleType, shape: Shape) -> Work:
        def make(shape: Shape) -> tuple[nn.Module, TransformerBlock]:
            block = build(EagerBlock, shape)
            return peers.TiledBlock(module, block), block

        return prepare(make, peers.checkpointed, shape)

    def ours(save: str) -> Provider:
        def make(shape: Shape) -> tuple[nn.Module, TransformerBlock]:
            block = build(TransformerBlock, shape, policy=Policy(save))
            return block, block

        return peers.ours("auto", device, partial(prepare, make, plain))

    def nothing_saved(provider: Provider) -> Provider:
        return provider if shape.length <= PLAIN_LENGTH else Provider(None, f"left out above {PLAIN_LENGTH} tokens", provider.ours)

    return Case(
        f"block dim {shape.spec.dim} / {shape.spec.hidden_dim} T={shape.length}", shape, check_shape,
        partial(written_out, torch.float64), partial(written_out, shape.dtype),
        {
            "torch checkpoint": Provider(partial(prepare, eager, peers.checkpointed)),
            "ours: input": ours("input"),
            "ours: attention": ours("attention"),
            "checkpoint, Liger tiled MLP": peers.liger(device, tiled, "liger_kernel.transformers"),
            "SAC, attention saved": Provider(partial(prepare, eager, peers.attention_saved)),
            "nothing checkpointed": nothing_saved(Provider(partial(prepare, eager, plain))),
            "ours: all": nothing_saved(ours("all")),
            "torch.compile": nothing_saved(Provider(partial(prepare, compiled, plain))),
        },
        TOLERANCE[shape.dtype], terms=max(shape.spec.hidden_dim, check_shape.length), flops=3 * shape.flops(), tokens=shape.length,
    )  # fmt: skip


def cases(args: argparse.Namespace) -> list[Case]:
    """The lengths in the order given."""
    spec, lengths, check = (SMALL, [24], 20) if args.small else (LLAMA, args.lengths, 640)
    shape = Shape(spec, check, args.dtype, args.device)
    return [case(shape._replace(length=length), shape) for length in lengths]


if __name__ == "__main__":
    lengths = {"type": int, "nargs": "+", "default": [8192, 32768, 131072], "help": "tokens"}
    sys.exit(main("block", "A block of Llama-8B's shape, forward and backward.", cases, lengths=lengths))
